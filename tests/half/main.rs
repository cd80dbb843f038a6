//! Training in 16 bit: about half the activations, gradients close to those of 32 bit, and plans,
//! splits and predictions as everywhere else.

#![cfg(feature = "flex")]

mod scaled;

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::backend::{Autodiff, Flex};
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataset::InMemDataset;
use burn::module::{AutodiffModule, Module, ModuleVisitor, Param};
use burn::optim::{AdamConfig, GradientsParams};
use burn::record::{BinBytesRecorder, FullPrecisionSettings, Recorder as _};
use burn::tensor::backend::{AutodiffBackend, Backend, BackendTypes};
use burn::tensor::{DType, Tensor, f16};
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{InferenceStep, SupervisedTraining, TrainStep};
use firebox::trace::{Heap, MemoryModel, StepRecorder, Trace};
use firebox::{
    Bytes, Half, Lazy, LazyBackend, Learner, Park, PlanReport, Sizing, SplitCheck,
    WeightedGradients, initialize,
};
use firebox_testing::zoo::{self, Numbered, Zoo};

type Full = Autodiff<Lazy<Flex>>;
type Sixteen = Autodiff<Half<Lazy<Flex>>>;
type Floats = Autodiff<Half<Lazy<Flex>, f16>>;
type Bytewise = BinBytesRecorder<FullPrecisionSettings>;

type Inner = <Sixteen as AutodiffBackend>::InnerBackend;
type InnerFloats = <Floats as AutodiffBackend>::InnerBackend;

/// Flex has one generator for the whole process.
fn alone() -> MutexGuard<'static, ()> {
    static GENERATOR: Mutex<()> = Mutex::new(());
    GENERATOR.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A forward and a backward pass.
fn pass<B, M>(items: usize) -> Trace
where
    B: AutodiffBackend + LazyBackend<Base = Flex>,
    M: Zoo<B> + TrainStep<Input = <M as Zoo<B>>::Batch> + AutodiffModule<B>,
{
    let device = Default::default();
    let model = M::new(&device);
    initialize(&model);
    let batch = M::batch(&(0..items).collect::<Vec<_>>(), &device);
    let recording = StepRecorder::new().record::<Flex, _>(|| model.step(batch).grads);
    recording.expect("nothing else is recorded here").discard().trace
}

/// What tensors take above what existed before a pass.
fn activations(trace: &Trace) -> Bytes {
    let footprint = Heap::simple().footprint(trace);
    footprint.peak - footprint.baseline
}

#[test]
fn activations_take_about_half() {
    let _alone = alone();
    macro_rules! check {
        ($($model:ident, $items:literal, $most:literal;)*) => {$(
            let full = activations(&pass::<Full, zoo::$model<Full>>($items));
            let half = activations(&pass::<Sixteen, zoo::$model<Sixteen>>($items));
            println!("{}: {half} of {full}, {:.3}", stringify!($model), half.ratio(full));
            assert!(half <= full.scale($most), "{}: {half} of {full}", stringify!($model));
        )*};
    }
    check! {
        Mlp, 256, 0.60;
        Cnn, 64, 0.60;
        ResNet, 64, 0.60;
        UNet, 64, 0.60;
        Encoder, 64, 0.60;
        Gpt, 64, 0.60;
        Autoencoder, 64, 0.60;
        Siamese, 64, 0.60;
        // Its cells are small next to the gradients of its parameters, which stay in 32 bit.
        Recurrent, 512, 0.75;
    }
}

#[test]
fn in_full_precision_everything_is_in_32_bit() {
    let _alone = alone();
    let device = Default::default();
    let wide = Tensor::<Half<Lazy<Flex>>, 2>::ones([4, 4], &device);
    let narrow = wide.clone().cast(DType::BF16);
    assert_eq!(wide.clone().matmul(narrow.clone()).dtype(), DType::BF16);
    let product = firebox::trace::in_full_precision(|| wide.clone().matmul(narrow.clone()));
    assert_eq!(product.dtype(), DType::F32);
    // What meets a larger tensor of 16 bit does not widen it.
    let scale = Tensor::<Half<Lazy<Flex>>, 2>::ones([1, 4], &device);
    assert_eq!((narrow.clone() * scale).dtype(), DType::BF16);
    assert_eq!((narrow + wide).dtype(), DType::F32);
}

/// The gradients of a step, all in one list, in the types of the parameters.
fn gradients<B, M>(initial: &[u8], items: usize) -> Vec<f32>
where
    B: AutodiffBackend<Device = <Flex as BackendTypes>::Device> + LazyBackend<Base = Flex>,
    B::InnerBackend: LazyBackend<Base = Flex>,
    M: Zoo<B> + TrainStep<Input = <M as Zoo<B>>::Batch> + AutodiffModule<B>,
{
    struct All {
        grads: GradientsParams,
        values: Vec<f32>,
    }

    impl<B: AutodiffBackend> ModuleVisitor<B> for All {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let Some(grad) = self.grads.remove::<B::InnerBackend, D>(param.id) else { return };
            assert_eq!(grad.dtype(), DType::F32, "the optimizer gets 32 bit");
            self.values.extend(grad.into_data().iter::<f32>());
        }
    }

    let device = Default::default();
    B::seed(&device, 7);
    let record = Bytewise::new().load(initial.to_vec(), &device).expect("it was recorded here");
    let model = M::new(&device).load_record(record);
    let batch = M::batch(&(0..items).collect::<Vec<_>>(), &device);
    let mut sum = WeightedGradients::mean(1.0);
    sum.add(&model, model.step(batch).grads, 1.0);
    let mut all = All { grads: sum.finish(&model), values: Vec::new() };
    model.visit(&mut all);
    all.values
}

#[test]
fn gradients_are_close_to_those_of_32_bit() {
    let _alone = alone();
    macro_rules! check {
        ($($model:ident, $most:literal;)*) => {$(
            let model = zoo::$model::<Full>::new(&Default::default());
            initialize(&model);
            let initial = Bytewise::new().record(model.into_record(), ()).expect("recorded");
            let full = gradients::<Full, zoo::$model<Full>>(&initial, 24);
            let half = gradients::<Sixteen, zoo::$model<Sixteen>>(&initial, 24);
            let norm = full.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
            let apart = full.iter().zip(&half).map(|(a, b)| f64::from(a - b).powi(2));
            let distance = apart.sum::<f64>().sqrt() / norm;
            println!("{}: {distance:.4} of the norm", stringify!($model));
            assert!(distance > 0.0 && distance <= $most, "{}: {distance}", stringify!($model));
            let half = gradients::<Floats, zoo::$model<Floats>>(&initial, 24);
            let apart = full.iter().zip(&half).map(|(a, b)| f64::from(a - b).powi(2));
            let of_floats = apart.sum::<f64>().sqrt() / norm;
            println!("{}: {of_floats:.4} of the norm in half floats", stringify!($model));
            // They have three bits more. Nothing is scaled here, so that some gradients vanish.
            assert!(of_floats > 0.0 && of_floats <= 0.05, "{of_floats}");
        )*};
    }
    check! {
        Mlp, 0.02;
        UNet, 0.02;
        Encoder, 0.02;
        Gpt, 0.02;
        Recurrent, 0.02;
    }
}

/// What the split check found while the Learner trained a model in micro-batches of `micro_batch`
/// items. Its parameters are in 32 bit.
fn trained<B, M, V>(micro_batch: usize) -> SplitCheck
where
    B: AutodiffBackend<Device = <Flex as BackendTypes>::Device> + LazyBackend<Base = Flex>,
    B::InnerBackend: LazyBackend<Base = Flex>,
    M: Zoo<B>
        + TrainStep<Input = <M as Zoo<B>>::Batch>
        + AutodiffModule<B, InnerModule = V>
        + fmt::Display
        + 'static,
    V: Zoo<B::InnerBackend> + InferenceStep<Input = <V as Zoo<B::InnerBackend>>::Batch> + 'static,
{
    struct InFull;

    impl<B: Backend> ModuleVisitor<B> for InFull {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            assert_eq!(param.val().dtype(), DType::F32, "parameters stay in 32 bit");
        }
    }

    let device = Default::default();
    B::seed(&device, 3);
    let folder = tempfile::tempdir().expect("a folder");
    let numbers = |count| InMemDataset::new((0..count).collect::<Vec<usize>>());
    let train = DataLoaderBuilder::<B, _, _>::new(Numbered::<M>::default());
    let valid = DataLoaderBuilder::<B::InnerBackend, _, _>::new(Numbered::<V>::default());
    let training = SupervisedTraining::new(
        folder.path(),
        train.batch_size(12).build(numbers(24)),
        valid.batch_size(12).build(numbers(12)),
    );
    let training = training.renderer(CliMetricsRenderer::new()).num_epochs(1);
    let builder = Learner::builder().auto_batch().memory(Bytes::gib(2)).quiet();
    let builder = builder.micro_batch(micro_batch);
    let learner = builder.build(M::new(&device), AdamConfig::new().init(), 1e-3);
    let fitted = learner.fit(training).expect("it fits");
    fitted.model.visit(&mut InFull);
    fitted.split_check
}

/// The bits of a GPT trained whole within a budget, with the optimizer's state parked in a file or
/// not, and the prediction.
fn trained_whole(memory: Bytes, parks: bool) -> (Vec<u32>, PlanReport) {
    struct Bits(Vec<u32>);

    impl<B: Backend> ModuleVisitor<B> for Bits {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.0.extend(param.val().into_data().iter::<f32>().map(f32::to_bits));
        }
    }

    type M = zoo::Gpt<Sixteen>;
    let device = Default::default();
    Sixteen::seed(&device, 3);
    let folder = tempfile::tempdir().expect("a folder");
    let numbers = |count| InMemDataset::new((0..count).collect::<Vec<usize>>());
    let train = DataLoaderBuilder::new(Numbered::<M>::default());
    let valid = DataLoaderBuilder::new(Numbered::<zoo::Gpt<Inner>>::default());
    let training = SupervisedTraining::new(
        folder.path(),
        train.batch_size(24).build(numbers(48)),
        valid.batch_size(24).build(numbers(24)),
    );
    let training = training.renderer(CliMetricsRenderer::new()).num_epochs(1);
    let builder = Learner::builder().auto_batch().memory(memory).sizing(Sizing::Whole).quiet();
    let builder = match parks {
        true => builder.park_optimizer(Park::Disk(folder.path().to_owned())),
        false => builder,
    };
    let learner = builder.build(M::new(&device), AdamConfig::new().init(), 1e-3);
    let fitted = learner.fit(training).expect("it fits");
    let mut bits = Bits(Vec::new());
    fitted.model.visit(&mut bits);
    (bits.0, fitted.report.expect("it was planned"))
}

#[test]
fn what_is_computed_again_and_parked_is_the_same_to_the_bit() {
    let _alone = alone();
    let (whole, report) = trained_whole(Bytes::gib(2), false);
    let memory = report.predicted().scale(0.75);
    let (again, report) = trained_whole(memory, true);
    assert!(report.recomputed.is_some() && report.parked > Bytes::ZERO, "{report}");
    assert!(report.predicted() <= memory, "{report}");
    assert!(whole == again, "the same bits");
}

#[test]
fn batches_are_split_as_in_32_bit() {
    let _alone = alone();
    macro_rules! check {
        ($($model:ident)*) => {$(
            let run = trained::<Sixteen, zoo::$model<Sixteen>, zoo::$model<Inner>>;
            let (whole, split) = (run(12), run(4));
            let found = (SplitCheck::NotNeeded, SplitCheck::Proved);
            assert_eq!((whole, split), found, "{}", stringify!($model));
            let split = trained::<Floats, zoo::$model<Floats>, zoo::$model<InnerFloats>>(4);
            assert_eq!(split, SplitCheck::Proved, "{}", stringify!($model));
        )*};
    }
    check!(Mlp Encoder Gpt Recurrent);
}
