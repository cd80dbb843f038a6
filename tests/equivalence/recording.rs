//! Tests the recording scope: nesting, panics, reads, threads, and what a discard leaves behind.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use burn::backend::{Autodiff, Flex};
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::nn::{BatchNormConfig, DropoutConfig, LinearConfig};
use burn::prelude::*;
use burn::tensor::backend::BackendTypes;
use firebox::trace::{RecordError, Step, StepRecorder, rehearse};
use firebox::{Bytes, Lazy, is_rehearsal};

use crate::{bits, random_state};

type L = Lazy<Flex>;

fn ones(device: &<Flex as burn::tensor::backend::BackendTypes>::Device) -> Tensor<L, 1> {
    Tensor::ones([4], device)
}

#[test]
fn recordings_do_not_nest() {
    let recorder = StepRecorder::new();
    let outer = recorder.record::<Flex, _>(|| recorder.record::<Flex, _>(|| ()).err());
    assert_eq!(*outer.expect("the outer one records").result(), Some(RecordError::Nested));
    assert!(recorder.record::<Flex, _>(|| ()).is_ok(), "the scope ended");
}

#[test]
fn a_panic_in_the_program_leaves_the_decorator_usable() {
    let device = Default::default();
    let x = ones(&device);
    let panic = catch_unwind(AssertUnwindSafe(|| {
        StepRecorder::new().record::<Flex, ()>(|| {
            let _promise = x.clone().exp();
            panic!("the program's own");
        })
    }));
    assert_eq!(
        panic.err().and_then(|p| p.downcast_ref::<&str>().copied()),
        Some("the program's own")
    );
    assert_eq!(x.sum().into_scalar(), 4.0);
}

#[test]
fn a_panicking_operation_leaves_other_tensors_usable() {
    let device = Default::default();
    let (x, y) = (ones(&device), Tensor::<L, 1>::ones([3], &device));
    let panic = catch_unwind(AssertUnwindSafe(|| x.clone() + y.clone()));
    assert!(panic.is_err(), "shapes do not match");
    assert_eq!((x.sum() + y.sum()).into_scalar(), 7.0);
}

#[test]
fn a_read_runs_what_was_recorded_and_goes_on() {
    let device = Default::default();
    let x = ones(&device);
    let recording = StepRecorder::new()
        .record::<Flex, _>(|| {
            let doubled = x.clone() * 2.0;
            let sum = doubled.clone().sum().into_scalar();
            doubled * sum
        })
        .expect("nothing is refused");
    let trace = recording.trace();
    let reads: Vec<_> = trace.reads().collect();
    assert_eq!(reads.len(), 1);
    assert!(matches!(trace.steps[reads[0].0 as usize], Step::Read(_)));
    assert!((reads[0].0 as usize) < trace.steps.len() - 1, "the recording went on");
    assert_eq!(recording.run().into_data().to_vec::<f32>().ok(), Some(vec![16.0; 4]));
}

#[test]
fn a_read_above_the_limit_is_refused_before_anything_runs() {
    let device = Default::default();
    let x = ones(&device);
    let recorder = StepRecorder::new()
        .limit_reads(Bytes::new(10), |trace| Bytes::new(16 * trace.calls().count() as u64));
    let refused = recorder.record::<Flex, _>(|| (x.clone() * 2.0).sum().into_scalar()).map(|_| ());
    assert!(
        matches!(refused, Err(RecordError::ReadTooLarge { needed, .. }) if needed == Bytes::new(32)),
        "{refused:?}"
    );
    assert_eq!(x.sum().into_scalar(), 4.0);
}

/// A refused read must not panic: a program may hold a lock around it, or be built to abort on
/// panics.
#[test]
fn a_program_whose_read_is_refused_goes_on() {
    let device = Default::default();
    let x = ones(&device);
    let losses = std::sync::Mutex::new(Vec::new());
    let refused = StepRecorder::new().refuse_reads().record::<Flex, _>(|| {
        assert!(!is_rehearsal());
        losses.lock().expect("nobody panics").push((x.clone() * 2.0).sum().into_scalar());
        assert!(is_rehearsal());
        losses.lock().expect("nobody panics").push(x.clone().max().into_scalar());
        x.clone() + 1.0
    });
    assert!(matches!(refused.map(|_| ()), Err(RecordError::ReadTooLarge { .. })));
    assert!(!is_rehearsal());
    assert_eq!(losses.into_inner().expect("not poisoned"), [0.0, 0.0]);
    assert_eq!(x.sum().into_scalar(), 4.0);
}

#[test]
fn a_program_that_waits_for_another_value_is_ended() {
    let device = Default::default();
    let x = ones(&device);
    let refused = StepRecorder::new()
        .refuse_reads()
        .record::<Flex, _>(|| while (x.clone() * 2.0).sum().into_scalar() < 1.0 {});
    assert!(matches!(refused.map(|_| ()), Err(RecordError::ReadTooLarge { .. })));
}

#[test]
fn other_threads_compute_meanwhile() {
    let device = Default::default();
    let x = ones(&device);
    let recording = StepRecorder::new().record::<Flex, _>(|| {
        let elsewhere = x.clone();
        let sum = std::thread::spawn(move || elsewhere.sum().into_scalar()).join();
        (sum.expect("the thread computes at once"), x.clone() + 1.0)
    });
    let (sum, promised) = recording.expect("records").run();
    assert_eq!((sum, promised.sum().into_scalar()), (4.0, 8.0));
}

/// Two threads that record at the same time use the same tensors, each under its own numbers.
#[test]
fn two_threads_record_with_the_same_tensors() {
    let device = Default::default();
    let tensors: Vec<Tensor<L, 1>> =
        (0..50).map(|i| Tensor::from_floats([i as f32], &device)).collect();
    let sum = |order: Vec<Tensor<L, 1>>| {
        for _ in 0..200 {
            let recording = StepRecorder::new().record::<Flex, _>(|| {
                // Tensors are numbered in the order in which they are first used. The value is the
                // last minus the first.
                let all = Tensor::cat(order.clone(), 0);
                all.sum() + (order[order.len() - 1].clone() - order[0].clone()) * 1e4
            });
            let recording = recording.expect("this thread records nothing else");
            recording.trace().check().expect("the trace is sound");
            let found: f32 = recording.run().into_scalar();
            let expected = if order[0].clone().into_scalar() == 0.0 { 1.0 } else { -1.0 };
            assert_eq!(found, 1225.0 + expected * 49e4);
        }
    };
    std::thread::scope(|scope| {
        let reversed = tensors.iter().rev().cloned().collect();
        scope.spawn(|| sum(reversed));
        sum(tensors.clone());
    });
}

/// Computes on the thread of a loader worker.
#[derive(Clone)]
struct Squares;

impl Batcher<L, f32, Tensor<L, 1>> for Squares {
    fn batch(&self, items: Vec<f32>, device: &<L as BackendTypes>::Device) -> Tensor<L, 1> {
        let items = Tensor::from_floats(items.as_slice(), device);
        items.clone() * items
    }
}

#[test]
fn workers_of_a_loader_compute_while_a_recording_goes_on() {
    let device = Default::default();
    let items: Vec<f32> = (0..64).map(|item| item as f32).collect();
    let loader = DataLoaderBuilder::new(Squares)
        .batch_size(4)
        .num_workers(2)
        .build(InMemDataset::new(items.clone()));
    let one = Tensor::<L, 1>::ones([4], &device);
    let recording = StepRecorder::new().record::<Flex, _>(|| {
        let recorded = loader.iter().map(|batch| {
            let asked = batch.clone().into_primitive().tensor();
            assert!(asked.is_promise(), "nobody has needed it");
            let sum = batch + one.clone();
            assert!(!asked.is_promise(), "it is computed when the recording needs it");
            sum
        });
        recorded.collect::<Vec<_>>()
    });
    let recording = recording.expect("records");
    let calls: Vec<_> = recording.trace().calls().map(|(_, call)| &*call.name).collect();
    assert_eq!(calls, ["float_add"; 16], "what workers compute is not recorded");
    let batches = recording.run().into_iter().map(|batch| batch.into_data().to_vec::<f32>());
    let mut values: Vec<f32> = batches.flat_map(|batch| batch.expect("f32")).collect();
    values.sort_by(f32::total_cmp);
    let expected: Vec<f32> = items.iter().map(|item| item * item + 1.0).collect();
    assert_eq!(values, expected, "every item once, from one worker or the other");
}

#[test]
fn an_operation_that_panics_when_a_recording_runs_leaves_other_tensors_usable() {
    let device = Default::default();
    let (x, y) = (ones(&device), ones(&device));
    let kept = Arc::new(Mutex::new(Vec::new()));
    let recording = StepRecorder::new().record::<Flex, _>(|| {
        let far = Tensor::<L, 1, Int>::from_ints([9], &device);
        let before = x.clone().exp();
        let after = x.clone().select(0, far) + y.clone().sum();
        kept.lock().expect("not poisoned").extend([before, after.clone()]);
        after
    });
    let recording = recording.expect("an index has no value while it is recorded");
    assert!(catch_unwind(AssertUnwindSafe(|| recording.run())).is_err(), "it is out of range");
    for promised in kept.lock().expect("not poisoned").drain(..) {
        let panic = catch_unwind(AssertUnwindSafe(|| promised.into_data()));
        let panic = panic.expect_err("the recording was not run to its end");
        let message = panic.downcast_ref::<String>().expect("a message");
        assert!(message.contains("failed"), "{message}");
    }
    assert_eq!((x.clone() + y.clone()).sum().into_scalar(), 8.0);
    let again = StepRecorder::new().record::<Flex, _>(|| x.clone() * y.clone());
    assert_eq!(again.expect("records").run().sum().into_scalar(), 4.0);
}

#[test]
fn a_tensor_that_outlives_a_discarded_recording_is_reported_and_explains_itself() {
    let device = Default::default();
    let x = ones(&device);
    let kept = Arc::new(Mutex::new(None));
    let recording = StepRecorder::new().record::<Flex, _>(|| {
        *kept.lock().expect("not poisoned") = Some(x.clone().reshape([2, 2]).exp());
    });
    let discarded = recording.expect("records").discard();
    let report: Vec<String> = discarded.survivors.iter().map(ToString::to_string).collect();
    assert_eq!(report, ["[2, 2] F32 of `float_exp`"]);
    let kept = kept.lock().expect("not poisoned").take().expect("kept");
    let panic = catch_unwind(AssertUnwindSafe(|| kept.into_data())).expect_err("no values");
    let message = panic.downcast_ref::<String>().expect("a message");
    assert!(message.contains("float_exp") && message.contains("discarded"), "{message}");
    assert_eq!(x.sum().into_scalar(), 4.0);
}

#[test]
fn a_discard_frees_what_died_inside() {
    let device = Default::default();
    let mut x = Some(ones(&device));
    let recording = StepRecorder::new().record::<Flex, _>(|| x.take().map(|x| x.exp().sum()));
    let trace = recording.expect("records").discard().trace;
    assert!(trace.existing().all(|t| !trace.survivors().contains(&t)), "consumed inside");
}

#[test]
fn host_data_stays_on_the_host() {
    let device = Default::default();
    let recording =
        StepRecorder::new().record::<Flex, _>(|| Tensor::<L, 1>::from_floats([1.0, 2.0], &device));
    let recording = recording.expect("records");
    assert!(
        matches!(recording.trace().steps[0], Step::Upload { host, .. } if host == Bytes::new(8))
    );
    assert_eq!(recording.run().into_data().to_vec::<f32>().ok(), Some(vec![1.0, 2.0]));
}

#[derive(Module, Debug)]
struct Coupled<B: Backend> {
    linear: burn::nn::Linear<B>,
    norm: burn::nn::BatchNorm<B>,
    dropout: burn::nn::Dropout,
}

impl<B: Backend> Coupled<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            linear: LinearConfig::new(4, 3).init(device),
            norm: BatchNormConfig::new(3).init(device),
            dropout: DropoutConfig::new(0.3).init(),
        }
    }

    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        self.dropout.forward(self.norm.forward(self.linear.forward(x)))
    }
}

type Seen = (Vec<crate::Bits>, crate::Bits);

/// Weights, running statistics and the next random numbers.
fn state<B: Backend>(model: &Coupled<B>, device: &B::Device) -> Seen {
    let weights = vec![
        bits(model.linear.weight.val().into_data()),
        bits(model.norm.running_mean.clone().into_record().val().into_data()),
        bits(model.norm.running_var.clone().into_record().val().into_data()),
    ];
    let next = Tensor::<B, 1>::random([4], burn::tensor::Distribution::Default, device);
    (weights, bits(next.into_data()))
}

/// State of a model before and after one real step, following `rehearsals` rehearsals.
fn after(rehearsals: usize, reads: bool) -> (Seen, Seen) {
    type B = Autodiff<L>;
    let device = Default::default();
    Flex::seed(&device, 3);
    let model = Coupled::<B>::new(&device);
    let x = Tensor::<B, 2>::from_floats([[1.0, 2.0, 3.0, 4.0], [0.0, -1.0, 2.0, 5.0]], &device);
    for _ in 0..rehearsals {
        let recorder = StepRecorder::new().substitute_random();
        let rehearsal = rehearse::<B, _>(&recorder, &model, |model| {
            let y = model.forward(x.clone());
            if reads {
                assert!(y.clone().sum().into_scalar().is_finite());
            }
            y.sum().backward();
        });
        let rehearsal = rehearsal.expect("nothing is refused");
        assert!(rehearsal.survivors.is_empty());
        assert_eq!(rehearsal.replaced, ["norm.running_mean", "norm.running_var"]);
    }
    if rehearsals == 0 {
        firebox::initialize::<B, _>(&model);
    }
    let before = state(&model, &device);
    let y = model.forward(x);
    assert!(y.sum().into_scalar().is_finite());
    (before, state(&model, &device))
}

#[test]
fn a_rehearsal_leaves_no_mark_on_a_model_that_never_ran() {
    let _lock = random_state();
    let without = after(0, false);
    assert!(without == after(3, false), "weights, statistics or random numbers differ");
    assert!(without == after(2, true), "the same where the step reads values");
}

#[test]
fn a_rehearsal_that_panics_leaves_no_mark() {
    let _lock = random_state();
    let device = Default::default();
    let model = Coupled::<Autodiff<L>>::new(&device);
    firebox::initialize::<Autodiff<L>, _>(&model);
    let mean = || bits(model.norm.running_mean.value().into_data());
    let before = mean();
    let panic = catch_unwind(AssertUnwindSafe(|| {
        rehearse::<Autodiff<L>, _>(&StepRecorder::new(), &model, |model| {
            model.forward(Tensor::ones([5, 4], &device));
            panic!("the step's own");
        })
    }));
    assert!(panic.is_err());
    assert_eq!(mean(), before);
    model.forward(Tensor::ones([5, 4], &device)).into_data();
}
