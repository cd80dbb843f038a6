//! Thousands of discarded recordings must leave the process's memory unchanged.
//!
//! The test has a process of its own, because the allocator counts for all threads.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::backend::{Autodiff, Flex};
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use firebox::Lazy;
use firebox::trace::{StepRecorder, rehearse};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

type L = Lazy<Flex>;
type B = Autodiff<L>;

#[derive(Module, Debug)]
struct Model<B: Backend> {
    linear: Linear<B>,
    norm: BatchNorm<B>,
    dropout: Dropout,
}

impl<B: Backend> Model<B> {
    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 1> {
        self.dropout.forward(self.norm.forward(self.linear.forward(x))).sum()
    }
}

/// Runs `discard` a thousand times and checks that the allocated bytes are the same afterwards.
///
/// The test harness allocates on its own thread at any time, so a round may be disturbed. One
/// undisturbed round out of three is enough: memory left by a discard would show in every round.
#[track_caller]
fn check(what: &str, mut discard: impl FnMut()) {
    // Tables grow at first, then keep their size.
    for _ in 0..100 {
        discard();
    }
    let mut rounds = Vec::new();
    for _ in 0..3 {
        let before = ALLOCATOR.current_usage();
        for _ in 0..1000 {
            discard();
        }
        let after = ALLOCATOR.current_usage();
        if after == before {
            return;
        }
        rounds.push((before, after));
    }
    panic!(
        "{what}: bytes allocated before and after each of three thousand-fold rounds: {rounds:?}"
    );
}

#[test]
fn a_thousand_discards_leave_the_allocator_as_it_was() {
    let device = Default::default();
    let x = Tensor::<L, 1>::ones([4096], &device);

    check("a discard", || {
        let recording = StepRecorder::new().record::<Flex, _>(|| (x.clone() + 1.0).exp().sum());
        recording.expect("records").discard();
    });
    check("a drop", || {
        drop(StepRecorder::new().record::<Flex, _>(|| (x.clone() + 1.0).exp().sum()));
    });
    check("a tensor whose last owner dies inside", || {
        let own = Tensor::<L, 1>::zeros([4096], &device);
        let recording = StepRecorder::new().record::<Flex, _>(|| own.exp().sum());
        recording.expect("records").discard();
    });
    check("a read", || {
        let recording = StepRecorder::new().record::<Flex, _>(|| {
            let sum = x.clone().exp().sum().into_scalar();
            x.clone() * sum
        });
        recording.expect("records").discard();
    });
    check("host data", || {
        let recording = StepRecorder::new()
            .record::<Flex, _>(|| Tensor::<L, 1>::from_floats([1.0; 256], &device));
        recording.expect("records").discard();
    });

    let silent = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    check("a panic", || {
        let recorded = catch_unwind(AssertUnwindSafe(|| {
            StepRecorder::new().record::<Flex, ()>(|| {
                let _promise = x.clone().exp();
                panic!("the program's own");
            })
        }));
        assert!(recorded.is_err());
    });
    std::panic::set_hook(silent);

    let model = Model::<B> {
        linear: LinearConfig::new(32, 16).init(&device),
        norm: BatchNormConfig::new(16).init(&device),
        dropout: DropoutConfig::new(0.2).init(),
    };
    let items = Tensor::<B, 2>::ones([8, 32], &device);
    check("a training step", || {
        let rehearsal = rehearse::<B, _>(&StepRecorder::new(), &model, |model| {
            let mut optimizer = AdamConfig::new().init();
            let gradients = model.forward(items.clone()).backward();
            let gradients = GradientsParams::from_grads(gradients, model);
            optimizer.step(0.1, model.clone(), gradients);
        });
        assert!(rehearsal.expect("records").survivors.is_empty());
    });
}
