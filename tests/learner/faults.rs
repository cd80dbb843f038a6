//! Tests a device that fails at one of its calls: at every seventh in turn, or, with
//! `cargo test --workspace --test learner -- --ignored`, at each.
//!
//! Training ends with an error and the state after the last whole optimizer step, or continues if
//! nothing was lost. It does not hang.

use std::collections::BTreeMap;
use std::sync::mpsc;
use std::time::Duration;

use burn::backend::Autodiff;
use burn::optim::AdamConfig;
use burn::prelude::*;
use burn::record::CompactRecorder;
use burn::tensor::backend::AutodiffBackend;
use burn::train::SupervisedTraining;
use burn::train::metric::LossMetric;
use burn::train::renderer::CliMetricsRenderer;
use burn_router::BackendRouter;
use firebox::{Bytes, Lazy, Learner, TrainError};
use firebox_testing::task::{Given, Net, batch, random_state, weights};

use crate::places::{Place, Places, with_fault};

type B = Autodiff<Lazy<BackendRouter<Places>>>;
type Inner = <B as AutodiffBackend>::InnerBackend;

/// Items in the batches of an epoch. They are split into micro-batches of three.
const SIZES: [usize; 2] = [7, 6];

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum End {
    Trained,
    Before,
    /// With an error, after this many optimizer steps.
    After(usize),
    /// With the optimizer's own state lost, and the model with it.
    Optimizer,
}

/// Values of all parameters.
type Weights = Vec<Vec<f32>>;

/// Why training ended, with the number of optimizer steps and the weights at that point.
type Failure = (TrainError, Option<(usize, Weights)>);

fn model() -> Net<B> {
    B::seed(&Place(0), 61);
    let model = Net::new(&Place(0));
    firebox::initialize(&model);
    model
}

/// Trains on the first batches, with a fault. Returns the trained model or the failure, and the
/// number of calls.
fn train(batches: usize, fault: usize) -> (Result<Weights, Failure>, usize) {
    let model = model();
    let sizes = &SIZES[..batches];
    let folder = tempfile::tempdir().expect("a folder");
    let training = SupervisedTraining::new(
        folder.path(),
        Given::loader(sizes.iter().map(|items| batch::<B>(*items)).collect()),
        Given::loader(vec![batch::<Inner>(4)]),
    )
    .metrics((LossMetric::new(),))
    .with_file_checkpointer(CompactRecorder::new())
    .with_application_logger(None)
    .renderer(CliMetricsRenderer::new())
    .num_epochs(1);
    let learner = Learner::builder()
        .auto_batch()
        .memory(Bytes::gib(1))
        .micro_batch(3)
        .quiet()
        .build(model, AdamConfig::new().init(), 1e-2);
    let (result, calls) = with_fault(fault, || learner.fit(training));
    let result = match result {
        Ok(fitted) => Ok(weights::<Inner, _>(&fitted.model)),
        Err(error) => {
            let (cause, state) = error.into_parts();
            Err((cause, state.map(|state| (state.iteration, weights::<B, _>(&state.model)))))
        }
    };
    (result, calls)
}

/// Runs a fault at every `stride`th call and counts how training ended.
fn inject(stride: usize, tell: &mpsc::Sender<Option<BTreeMap<End, usize>>>) {
    let trained: Vec<_> =
        (1..=SIZES.len()).map(|batches| train(batches, usize::MAX).0.expect("no fault")).collect();
    let (_, calls) = train(SIZES.len(), usize::MAX);
    assert!(calls > 200, "{calls} calls are few");
    let initial = weights::<B, _>(&model());
    let mut ends = BTreeMap::new();
    for fault in (1..=calls).step_by(stride) {
        let end = match train(SIZES.len(), fault).0 {
            Ok(weights) => {
                assert_eq!(weights, trained[SIZES.len() - 1], "fault {fault} is lost");
                End::Trained
            }
            Err((cause, state)) => {
                let says = format!("fault {fault} in");
                assert!(cause.to_string().contains(&says), "fault {fault}: {cause}");
                match (cause, state) {
                    (TrainError::OptimizerPanicked { .. }, _) => End::Optimizer,
                    (cause, None) => {
                        let has_begun = ends.contains_key(&End::After(0));
                        assert!(!has_begun, "fault {fault} loses the state: {cause}");
                        End::Before
                    }
                    (cause, Some((0, weights))) => {
                        assert_eq!(weights, initial, "fault {fault}: {cause}");
                        End::After(0)
                    }
                    (cause, Some((steps, weights))) => {
                        assert_eq!(weights, trained[steps - 1], "fault {fault}: {cause}");
                        End::After(steps)
                    }
                }
            }
        };
        *ends.entry(end).or_default() += 1;
        tell.send(None).expect("the test waits");
    }
    tell.send(Some(ends)).expect("the test waits");
}

#[test]
fn a_fault_at_a_call_of_the_device_loses_nothing() {
    faults(7);
}

#[test]
#[ignore = "over a minute"]
fn a_fault_at_any_call_of_the_device_loses_nothing() {
    faults(1);
}

fn faults(stride: usize) {
    let _lock = random_state();
    let (tell, ends) = mpsc::channel();
    let run = std::thread::spawn(move || inject(stride, &tell));
    let ends = loop {
        // One training takes a tenth of a second.
        match ends.recv_timeout(Duration::from_secs(60)) {
            Ok(Some(ends)) => break ends,
            Ok(None) => {}
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("training hangs"),
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                std::panic::resume_unwind(run.join().expect_err("it did not tell"))
            }
        }
    };
    println!("{ends:?}");
    for end in [End::Trained, End::After(0), End::After(1), End::After(2), End::Optimizer] {
        assert!(ends.contains_key(&end), "no fault ended as {end:?}: {ends:?}");
    }
}
