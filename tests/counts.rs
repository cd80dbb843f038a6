//! How often recording asks the allocator for memory and takes locks, as exact numbers: they do not
//! depend on how busy the machine is. More of them is slower for small steps.

#![cfg(feature = "flex")]

use std::sync::{Mutex, PoisonError};

use allocation_counter::measure;
use burn::backend::{Autodiff, Flex};
use burn::nn::LinearConfig;
use burn::tensor::Tensor;
use firebox::trace::StepRecorder;
use firebox::{Bytes, Lazy, Learner};
use firebox_lazy::{LoaderGate, TrainingGuard, locks_taken};

/// The allocations of this thread while `f` runs.
fn allocations<R>(f: impl FnOnce() -> R) -> (u64, R) {
    let mut result = None;
    let counted = measure(|| result = Some(f()));
    (counted.count_total, result.expect("it has run"))
}

type T = Tensor<Lazy<Flex>, 1>;

/// One test at a time: while one thread trains, others leave tensors to it.
fn alone() -> impl Drop {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A chain of calls that the thread has recorded before: the allocations of recording it, and of
/// running it.
fn chain(calls: usize) -> [u64; 2] {
    let x = T::from_floats([1.0, 2.0, 3.0], &Default::default());
    let record = || {
        let (recorded, recording) = allocations(|| {
            StepRecorder::new().record::<Flex, _>(|| (0..calls).fold(x.clone(), |x, _| x.tanh()))
        });
        let (ran, result) = allocations(|| recording.expect("nothing else records").run());
        drop(result);
        [recorded, ran]
    };
    for _ in 0..3 {
        record();
    }
    record()
}

#[test]
fn a_known_call_takes_three_allocations() {
    let _alone = alone();
    // Lists grow by a quarter.
    let (few, many) = (chain(2_000), chain(10_000));
    let each = [0, 1].map(|at| (many[at] - few[at]) as f64 / 8_000.0);
    println!("{each:?} allocations a call to record and to run it");
    assert!(each[0] < 3.01 && each[0] >= 3.0, "{each:?} to record");
    assert!(each[1] < 2.01, "{each:?} to run");
}

#[test]
fn a_known_call_takes_no_lock() {
    let _alone = alone();
    let guards = [None, Some(TrainingGuard::enter::<Flex>())];
    let x = T::from_floats([1.0, 2.0, 3.0], &Default::default());
    for guard in &guards {
        let locks = |calls: usize| {
            let before = locks_taken();
            let chain = || (0..calls).fold(x.clone(), |x, _| x.tanh());
            let recording = StepRecorder::new().record::<Flex, _>(chain);
            drop(recording.expect("nothing else records").run());
            locks_taken() - before
        };
        let (few, many) = (locks(10), locks(1_000));
        println!("{few} locks, for ten calls as for a thousand");
        assert_eq!(few, many, "{guard:?}");
        assert!(few <= 3, "{few}");
    }
}

#[test]
fn a_recording_begins_with_few() {
    let _alone = alone();
    let [recorded, ran] = chain(1);
    println!("{recorded} and {ran} allocations for one call");
    assert!(recorded <= 19 && ran <= 6, "{recorded} to record, {ran} to run");
}

#[test]
fn a_call_of_a_loader_thread_takes_few() {
    let _alone = alone();
    let loads = || {
        let device = Default::default();
        let x = T::from_floats([1.0, 2.0, 3.0], &device);
        let calls = |count: usize| {
            let (taken, result) = allocations(|| (0..count).fold(x.clone(), |x, _| x.tanh()));
            drop(result);
            taken
        };
        for _ in 0..3 {
            calls(10);
        }
        let before = locks_taken();
        let few = (calls(100), locks_taken() - before);
        let many = (calls(300), locks_taken() - before - few.1);
        [many.0 - few.0, many.1 - few.1].map(|more| more as f64 / 200.0)
    };
    let takes = |way: &str, most: [f64; 2]| {
        let thread = std::thread::Builder::new().name("dataloader-0".into()).spawn(loads);
        let taken = thread.expect("a thread").join().expect("it loads");
        println!("{taken:?} allocations and locks for a call of a loader thread, {way}");
        assert!(taken[0] <= most[0] && taken[1] <= most[1], "{way}: {taken:?}");
    };
    let guard = LoaderGate::enter();
    takes("deferred", [10.0, 1.0]);
    guard.compute();
    takes("computed", [1.0, 0.0]);
    drop(guard);
    let model = LinearConfig::new(1, 1).init::<Autodiff<Lazy<Flex>>>(&Default::default());
    let builder = Learner::builder().auto_batch().memory(Bytes::mib(64)).loaders_compute();
    let _planner = builder.step_planner(&model).expect("it is ready");
    takes("computed for a loop of one's own", [1.0, 0.0]);
}
