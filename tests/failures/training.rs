//! Trains with the Learner on a small device and checks the state that is left when a buffer is
//! refused.

use std::panic::set_hook;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::backend::Autodiff;
use burn::data::dataloader::{DataLoader, DataLoaderIterator};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{AdamConfig, LearningRate, Optimizer, SimpleOptimizer};
use burn::prelude::*;
use burn::record::{FullPrecisionSettings, PrettyJsonFileRecorder, Recorder};
use burn::train::metric::LossMetric;
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{LearningComponentsMarker, SupervisedTraining};
use cubecl::wgpu::WgpuDevice;
use firebox::train::{ByMicroBatch, DeviceFailure, During, LastState, Splitter};
use firebox::{
    Bytes, Coupling, DeviceMemory, FitError, Fitted, Lazy, Learner, LossReduction, MicroBatchError,
    TrainError,
};
use firebox_testing::task::{Given, Net, Points, batch, weights};

type Ad<I> = Autodiff<Lazy<I>>;
type Training<I, O> = SupervisedTraining<LearningComponentsMarker<Ad<I>, f64, Net<Ad<I>>, O>>;
type Outcome<I, O> = Result<
    Fitted<Net<Lazy<I>>>,
    FitError<Net<Ad<I>>, <O as Optimizer<Net<Ad<I>>, Ad<I>>>::Record, ()>,
>;
type Json = PrettyJsonFileRecorder<FullPrecisionSettings>;

/// Number of calls of the program's panic hook.
static HOOK_CALLS: AtomicUsize = AtomicUsize::new(0);

/// A loader with different batches in every epoch, given by their sizes.
struct Epochs<I: Backend> {
    sizes: Vec<Vec<usize>>,
    next: AtomicUsize,
    backend: std::marker::PhantomData<fn() -> I>,
}

impl<I: Backend> Epochs<I> {
    fn loader(sizes: Vec<Vec<usize>>) -> Arc<dyn DataLoader<I, Points<I>>> {
        Arc::new(Self { sizes, next: AtomicUsize::new(0), backend: std::marker::PhantomData })
    }
}

struct Batches<I: Backend>(std::vec::IntoIter<usize>, std::marker::PhantomData<fn() -> I>);

impl<I: Backend> Iterator for Batches<I> {
    type Item = Points<I>;

    fn next(&mut self) -> Option<Points<I>> {
        self.0.next().map(batch)
    }
}

impl<I: Backend> DataLoaderIterator<Points<I>> for Batches<I> {
    fn progress(&self) -> burn::data::dataloader::Progress {
        burn::data::dataloader::Progress::new(0, 1)
    }
}

impl<I: Backend> DataLoader<I, Points<I>> for Epochs<I> {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<Points<I>> + 'a> {
        let epoch = self.next.fetch_add(1, Ordering::Relaxed);
        let sizes = self.sizes[epoch.min(self.sizes.len() - 1)].clone();
        Box::new(Batches(sizes.into_iter(), std::marker::PhantomData))
    }

    fn num_items(&self) -> usize {
        self.sizes[0].iter().sum()
    }

    fn to_device(&self, _device: &I::Device) -> Arc<dyn DataLoader<I, Points<I>>> {
        Self::loader(self.sizes.clone())
    }

    fn slice(&self, _start: usize, _end: usize) -> Arc<dyn DataLoader<I, Points<I>>> {
        Self::loader(self.sizes.clone())
    }
}

/// Training on epochs of batches with these sizes, with a metric and a validation on `validated`
/// items.
fn training<I, O>(folder: &Path, epochs: &[&[usize]], validated: usize) -> Training<I, O>
where
    I: DeviceMemory<Device = WgpuDevice>,
    O: Optimizer<Net<Ad<I>>, Ad<I>> + 'static,
{
    let sizes = epochs.iter().map(|sizes| sizes.to_vec()).collect();
    SupervisedTraining::new(folder, Epochs::loader(sizes), Given::loader(vec![batch(validated)]))
        .metric_train_numeric(LossMetric::new())
        .metric_valid_numeric(LossMetric::new())
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .num_epochs(epochs.len())
}

fn learner() -> firebox::LearnerBuilder<firebox::train::ByMicroBatch, firebox::train::ByMicroBatch>
{
    Learner::builder().auto_batch().memory(Bytes::gib(1)).quiet()
}

type Adam<I> = OptimizerAdaptor<burn::optim::Adam, Net<Ad<I>>, Ad<I>>;

fn fit<I>(model: &Net<Ad<I>>, training: Training<I, Adam<I>>) -> Outcome<I, Adam<I>>
where
    I: DeviceMemory<Device = WgpuDevice>,
{
    learner().build(model.clone(), AdamConfig::new().init(), 1e-2).fit(training)
}

fn model<I: Backend>(device: &I::Device) -> Net<Ad<I>> {
    set_hook(Box::new(|_| {
        HOOK_CALLS.fetch_add(1, Ordering::Relaxed);
    }));
    let model = Net::new(device);
    firebox::initialize(&model);
    model
}

/// Checks what holds for all failed runs and returns the failure.
#[track_caller]
fn failure<T, M, R, S>(
    outcome: Result<T, FitError<M, R, S>>,
) -> (DeviceFailure, Option<LastState<M, R, S>>) {
    let Err(error) = outcome else { panic!("a buffer was refused") };
    println!("error: {error}");
    let (cause, state) = error.into_parts();
    let TrainError::DeviceFailed(failure) = cause else { panic!("not of the device: {cause}") };
    assert!(failure.message.contains("can't allocate buffer"), "{}", failure.message);
    assert!(failure.plan.is_some() && failure.measured.is_some(), "{failure:?}");
    assert!(HOOK_CALLS.load(Ordering::Relaxed) > 0, "the program's own panic hook runs");
    (*failure, state)
}

/// The third of four batches needs a buffer that the device refuses.
pub fn micro_steps<I: DeviceMemory<Device = WgpuDevice>>(device: &WgpuDevice) {
    let folder = tempfile::tempdir().expect("a folder");
    let model = model::<I>(device);
    let good = fit(&model, training(folder.path(), &[&[8, 8]], 8)).expect("both batches fit");
    let outcome = fit(&model, training(folder.path(), &[&[8, 8, 100, 8]], 8));
    let (failure, state) = failure(outcome);
    assert_eq!(failure.during, During::MicroSteps);
    assert_eq!(failure.items.map(|items| items.get()), Some(100));
    let state = state.expect("two steps were whole");
    assert_eq!((state.epoch, state.iteration), (1, 2));
    assert!(state.optimizer.is_some());
    assert_eq!(weights(&state.model), weights(&good.model), "no step was made of the failure");
}

/// The batch that fails whole trains in two micro-batches.
pub fn split<I: DeviceMemory<Device = WgpuDevice>>(device: &WgpuDevice) {
    let folder = tempfile::tempdir().expect("a folder");
    let model = model::<I>(device);
    let fitted = learner()
        .micro_batch(50)
        .build(model, AdamConfig::new().init(), 1e-2)
        .fit(training::<I, Adam<I>>(folder.path(), &[&[8, 100]], 8));
    fitted.expect("50 items fit");
    assert_eq!(HOOK_CALLS.load(Ordering::Relaxed), 0);
}

/// On a device that does not fail, the checks do not change what burn computes.
pub fn equal<I: DeviceMemory<Device = WgpuDevice>>(device: &WgpuDevice) {
    let folder = tempfile::tempdir().expect("a folder");
    let model = model::<I>(device);
    let training = || training::<I, Adam<I>>(folder.path(), &[&[8, 48, 8], &[8, 48]], 8);
    let ours = fit(&model, training()).expect("all fits");
    let burns = burn::train::Learner::new(model, AdamConfig::new().init(), 1e-2);
    assert_eq!(weights(&ours.model), weights(&training().launch(burns).model));
}

/// Validation needs a buffer that the device refuses.
pub fn validation<I: DeviceMemory<Device = WgpuDevice>>(device: &WgpuDevice) {
    let folder = tempfile::tempdir().expect("a folder");
    let model = model::<I>(device);
    let good = fit(&model, training(folder.path(), &[&[8]], 8)).expect("it fits");
    let (failure, state) = failure(fit(&model, training(folder.path(), &[&[8]], 100)));
    assert_eq!(failure.during, During::Validation);
    let state = state.expect("the step was whole");
    assert_eq!((state.epoch, state.iteration), (1, 1));
    assert_eq!(weights(&state.model), weights(&good.model));
}

/// The second epoch fails. The checkpoint of the first is on disk.
pub fn checkpoint<I: DeviceMemory<Device = WgpuDevice>>(device: &WgpuDevice) {
    let folder = tempfile::tempdir().expect("a folder");
    let model = model::<I>(device);
    let good = fit(&model, training(folder.path(), &[&[8, 8]], 8)).expect("it fits");
    let training = training(folder.path(), &[&[8, 8], &[100]], 8);
    let (_, state) = failure(fit(&model, training.with_file_checkpointer(Json::new())));
    let state = state.expect("the first epoch was whole");
    assert_eq!((state.epoch, state.iteration), (2, 0));
    let file = folder.path().join("checkpoint/model-1");
    let record = Recorder::<Ad<I>>::load(&Json::new(), file, device).expect("it is on disk");
    assert_eq!(weights(&model.load_record(record)), weights(&good.model));
}

/// Gradient descent that asks for a large buffer in its third step.
#[derive(Clone)]
struct Greedy;

impl<I: Backend> SimpleOptimizer<I> for Greedy {
    type State<const D: usize> = usize;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<I, D>,
        grad: Tensor<I, D>,
        state: Option<usize>,
    ) -> (Tensor<I, D>, Option<usize>) {
        let steps = state.unwrap_or(0) + 1;
        let mut tensor = tensor - grad * lr;
        if steps == 3 {
            let many = Tensor::<I, 1>::from_floats([0.5; 2000].as_slice(), &tensor.device());
            tensor = tensor + many.sum().reshape([1; D]);
        }
        (tensor, Some(steps))
    }

    fn to_device<const D: usize>(steps: usize, _device: &I::Device) -> usize {
        steps
    }
}

/// The optimizer needs a buffer that the device refuses.
pub fn optimizer<I: DeviceMemory<Device = WgpuDevice>>(device: &WgpuDevice) {
    let folder = tempfile::tempdir().expect("a folder");
    let model = model::<I>(device);
    let optimizer = OptimizerAdaptor::<Greedy, Net<Ad<I>>, Ad<I>>::from(Greedy);
    let outcome =
        learner().build(model, optimizer, 1e-2).fit(training(folder.path(), &[&[8, 8, 8, 8]], 8));
    let (failure, state) = failure(outcome);
    assert_eq!(failure.during, During::OptimizerStep);
    assert!(state.is_none(), "no step can be gone on from");
}

/// After a failure, firebox's panic hook is quiet and calls the program's own again.
pub fn afterwards<I: DeviceMemory<Device = WgpuDevice>>(device: &WgpuDevice) {
    micro_steps::<I>(device);
    let before = HOOK_CALLS.load(Ordering::Relaxed);
    let thread = std::thread::Builder::new().name("DSD-4-0".to_owned());
    thread.spawn(|| panic!("nobody trains")).expect("a thread").join().expect_err("it panicked");
    assert_eq!(HOOK_CALLS.load(Ordering::Relaxed), before + 1);
    let folder = tempfile::tempdir().expect("a folder");
    let fitted = fit(&model::<I>(device), training(folder.path(), &[&[8, 8]], 8));
    fitted.expect("what fits can be trained on a device that has failed before");
}

/// A mean loss whose gradients are to be summed is refused before training, as on the CPU. The
/// items are compared on the host.
pub fn coupled<I>(device: &WgpuDevice)
where
    I: DeviceMemory<Device = WgpuDevice>,
{
    refused_as_a_sum::<I, _>(device, ByMicroBatch);
}

/// A splitter that reads a value of the batch. The host does not have the value while a step is
/// only recorded.
#[derive(Clone, Copy, Debug)]
struct Reading;

impl<B: Backend> Splitter<Points<B>> for Reading {
    fn items(&self, batch: &Points<B>) -> Result<usize, MicroBatchError> {
        ByMicroBatch.items(batch)
    }

    fn range(&self, batch: &Points<B>, range: std::ops::Range<usize>) -> Points<B> {
        let largest: f32 = batch.inputs.clone().abs().max().into_scalar().elem();
        assert!(largest < 1e6, "the points are small");
        ByMicroBatch.range(batch, range)
    }

    fn weight(&self, batch: &Points<B>) -> f64 {
        ByMicroBatch.weight(batch)
    }
}

/// Same as [`coupled`] where the host cannot compute the step. The device compares a micro-batch
/// with its halves.
pub fn coupled_there<I>(device: &WgpuDevice)
where
    I: DeviceMemory<Device = WgpuDevice>,
{
    refused_as_a_sum::<I, _>(device, Reading);
}

/// A mean loss trains in parts, and is refused if declared as a sum.
fn refused_as_a_sum<I, S>(device: &WgpuDevice, splitter: S)
where
    I: DeviceMemory<Device = WgpuDevice>,
    S: Splitter<Points<Ad<I>>> + Copy,
{
    let model = model::<I>(device);
    let folder = tempfile::tempdir().expect("a folder");
    let fit = |reduction| -> Outcome<I, Adam<I>> {
        let training = training(folder.path(), &[&[12]], 2);
        let learner = Learner::builder().auto_batch_with(splitter, ByMicroBatch);
        let learner = learner.memory(Bytes::gib(1)).quiet().micro_batch(4).reduction(reduction);
        learner.build(model.clone(), AdamConfig::new().init(), 1e-2).fit(training)
    };
    fit(LossReduction::Mean).expect("the loss is a mean");
    let (cause, _) = fit(LossReduction::Sum).expect_err("the loss is a mean").into_parts();
    let is_mean = matches!(cause, TrainError::Coupled { coupling: Coupling::Mean, .. });
    assert!(is_mean, "{cause}");
}
