//! Trains on a GPU, which may be one in software: predictions against the pages of the pools,
//! values, and the work of other threads while steps are rehearsed.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::backend::DispatchDevice;
use burn::cubecl::MemoryScope;
use burn::data::dataloader::batcher::Batcher;
use burn::optim::AdamConfig;
use burn::tensor::{Device, DeviceKind, Tensor, TensorData};
use firebox::{Bytes, Fitted, Learner, SavedTrace, Split, SplitCheck, TrainError};
use firebox_trace::{Category, TensorInfo};

use net::{FEW, Kind, Net, PointBatcher, close, numbers, train_on};

mod net;

/// One training at a time: they share the pools.
fn alone() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

fn device() -> Device {
    Device::wgpu(DeviceKind::DefaultDevice).autodiff()
}

/// So much more than what earlier trainings of this process have left on the pools of threads that
/// have ended.
fn beside(bytes: Bytes) -> Bytes {
    let device = device().inner();
    device.memory_cleanup();
    let DispatchDevice::Cube(cube) = device.as_dispatch() else { panic!("it is a GPU") };
    let usage = cube.client().memory_report(MemoryScope::Device).usage();
    Bytes::new(usage.bytes_reserved) + bytes
}

/// A training within a budget, and what it takes is no more than predicted.
fn within(kind: Kind, budget: Bytes) -> Fitted<Net> {
    let fitted = trained(kind, budget).expect("it fits");
    let Fitted { predicted, measured, .. } = fitted;
    println!("{predicted} predicted, {measured} measured, {}", fitted.plans[0].line());
    assert!(measured <= predicted && predicted <= budget, "{measured}, {predicted}");
    fitted
}

/// The same with less and less memory, until the batch is split.
fn split(kind: Kind) -> Fitted<Net> {
    let budgets = (5..12).rev().map(|quarter| Bytes::mib(4 * quarter));
    let mut fitted = budgets.map(|budget| within(kind, beside(budget)));
    fitted.find(|fitted| fitted.plans[0].plan.len() >= 2).expect("a budget is too small")
}

fn trained(kind: Kind, memory: Bytes) -> Result<Fitted<Net>, TrainError> {
    train_on(&device(), kind, Learner::builder().auto_batch().memory(memory))
}

#[test]
fn a_split_training_is_the_whole_one_within_the_prediction() {
    let _alone = alone();
    let whole = within(Kind::Plain, Bytes::gib(2));
    assert!(whole.plans[0].plan.is_whole());
    let split = split(Kind::Plain);
    assert_eq!(split.split_check, SplitCheck::Agreed);
    close(&numbers(&whole.model), &numbers(&split.model), 2e-3);
}

/// What the device refuses is computed in smaller micro-batches, and nothing of it is learned.
#[test]
fn a_step_that_the_device_cannot_compute_is_made_again() {
    let _alone = alone();
    let builder = || Learner::builder().auto_batch().memory(Bytes::gib(2)).split_although_coupled();
    let whole = train_on(&device(), Kind::Plain, builder()).expect("it fits");
    let again = train_on(&device(), Kind::Hungry, builder()).expect("it goes on");
    let planned = &again.plans[..2];
    assert!(planned.iter().all(|plan| plan.plan.is_whole()), "both sizes were planned whole");
    let largest = again.smaller.expect("the device has refused larger ones");
    assert!(largest <= FEW && largest > FEW / 4, "{largest}");
    close(&numbers(&whole.model), &numbers(&again.model), 2e-3);
}

/// A step that does something else where a value that it reads is small is planned by real steps.
#[test]
fn a_step_that_reads_values_is_planned_by_steps_that_run() {
    let _alone = alone();
    let whole = within(Kind::Reading, Bytes::gib(2));
    close(&numbers(&whole.model), &numbers(&split(Kind::Reading).model), 2e-3);
}

#[test]
fn what_other_threads_compute_meanwhile_is_right() {
    let _alone = alone();
    let ends = AtomicBool::new(false);
    let (right, wrong) = std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let (device, mut right, mut wrong) = (device().inner(), 0, 0);
            let mut number = 0.0_f32;
            while !ends.load(Relaxed) {
                number += 1.0;
                let tensor =
                    Tensor::<1>::from_data(TensorData::new(vec![number; 64], [64]), &device);
                let data = (tensor * 2.0 + 1.0).into_data();
                match data.iter::<f32>().all(|value| value == 2.0 * number + 1.0) {
                    true => right += 1,
                    false => wrong += 1,
                }
            }
            (right, wrong)
        });
        let fitted = trained(Kind::Norm, Bytes::gib(2));
        ends.store(true, Relaxed);
        fitted.expect("it fits");
        other.join().expect("it does not panic")
    });
    println!("{right} right, {wrong} wrong");
    assert!(right > 20 && wrong == 0, "{right} right, {wrong} wrong");
}

#[test]
fn what_cannot_be_planned_is_an_error_before_training() {
    let _alone = alone();
    let error = train_on(&device(), Kind::Plain, Learner::builder().auto_batch()).err();
    let error = error.expect("wgpu does not say what is free");
    assert!(matches!(error, TrainError::UnknownFree { .. }), "{error}");
    let error = trained(Kind::Plain, Bytes::mib(1)).err().expect("it does not fit");
    assert!(matches!(error, TrainError::DoesNotFit(_)), "{error}");
}

/// A recorded step is known on other numbers of items, and says what tensors are for. The file
/// stays for the command line.
#[test]
fn a_step_is_saved_for_batches_of_all_sizes() {
    let _alone = alone();
    let model = Net::new(Kind::Dropout, &device());
    let learner = Learner::builder().quiet().build(model, AdamConfig::new().init(), 1e-2);
    let batch = PointBatcher.batch((0..200).collect(), &device());
    let saved = learner.trace(&batch).expect("it is recorded");
    let given = saved.sample(Split::chunks(1000, 64)).expect("it is known").trace;
    given.check().expect("it is a program");
    let bytes = |of: Category| {
        let is_it = |it: &&TensorInfo| it.label.as_ref().is_some_and(|label| label.category == of);
        given.tensors.iter().filter(is_it).map(|it| it.bytes().get()).sum::<u64>()
    };
    assert_eq!(bytes(Category::Parameter), saved.about().parameters.get());
    assert!(bytes(Category::OptimizerState) >= 4 * saved.about().parameters.get());
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("net.trace");
    saved.save(&path).expect("it is written");
    assert_eq!(SavedTrace::load(&path).expect("it is whole"), saved);

    let flex = Device::flex().autodiff();
    let learner = Learner::builder().quiet().build(
        Net::new(Kind::Plain, &flex),
        AdamConfig::new().init(),
        1e-2,
    );
    let error = learner.trace(&PointBatcher.batch(vec![1, 2], &flex)).expect_err("it says nothing");
    assert!(matches!(error, TrainError::NotTraced { .. }), "{error}");
}

/// The page has the operations, modules and tensors of the step.
#[test]
fn a_report_shows_where_the_memory_goes() {
    let _alone = alone();
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("memory.html");
    let builder = Learner::builder().auto_batch().memory(Bytes::gib(2)).report(&path);
    let fitted = train_on(&device(), Kind::Plain, builder).expect("it fits");
    let page = std::fs::read_to_string(&path).expect("the page was written");
    let names = ["float_matmul", "activations", "optimizer state", "first.weight", "micro-step 1"];
    for name in names {
        assert!(page.contains(name), "{name} is not on the page");
    }
    assert!(page.contains(&format!("\"peak\":{}", fitted.plans[0].plan.peak().get())));
}
