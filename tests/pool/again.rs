//! Steps that compute tensors again on a GPU: the same bits where nothing is fused, nearly the same
//! where a recomputed value may come from another kernel, and the memory that was predicted.

use std::sync::Arc;

use burn::backend::Autodiff;
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataset::InMemDataset;
use burn::module::{AutodiffModule, ModuleVisitor, Param};
use burn::optim::{AdamConfig, GradientsParams};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{SupervisedTraining, TrainStep};
use burn_cubecl::CubeBackend;
use cubecl::wgpu::WgpuRuntime;
use firebox::pool::Pooled;
use firebox::trace::StepRecorder;
use firebox::{Bytes, DeviceMemory, Lazy, LazyBackend, Learner, MemoryUse, PlanReport, initialize};
use firebox_recompute::{Demand, Program, Rates, select};
use firebox_testing::zoo::{self, Numbered, Zoo};

use crate::{Ours, SEED, alone, device};

/// firebox's pool without fusion.
type Unfused = Autodiff<Lazy<CubeBackend<Pooled<WgpuRuntime>, f32, i32, u8>>>;

const ITEMS: usize = 6;

/// Shares of the bytes that a step takes at its peak.
const SHARES: [f64; 3] = [0.8, 0.6, 0.45];

/// The gradients of a step, as it was recorded or within a share of its bytes, and how many calls
/// were repeated.
fn gradients<B, M>(model: &M, device: &B::Device, share: Option<f64>) -> (Vec<f32>, usize)
where
    B: AutodiffBackend + LazyBackend<Base: DeviceMemory>,
    M: Zoo<B> + TrainStep<Input = <M as Zoo<B>>::Batch> + AutodiffModule<B>,
{
    B::seed(device, SEED);
    let of = device.clone();
    let drain = move || B::Base::drain(&of);
    let batch = M::batch(&(0..ITEMS).collect::<Vec<_>>(), device);
    let recording =
        StepRecorder::new().record::<B::Base, _>(|| TrainStep::step(model, batch).grads);
    let mut recording = recording.expect("nothing else is recorded here");
    let program = share.and_then(|share| {
        let trace = recording.trace();
        let demand = Demand { drains: true, ..Demand::new(trace, &Rates::RTX_4090) };
        let peak = select(trace, Bytes::MAX, &demand)?.peak;
        let recipe = select(trace, peak.scale(share), &demand)?.recipe;
        Some(Arc::new(Program::new(trace, &recipe).expect("it passes the checker")))
    });
    if let Some(program) = &program {
        assert!(recording.rewrite(program, drain), "the program is that of the recording");
    }
    let mut all = All { grads: recording.run(), values: Vec::new() };
    model.visit(&mut all);
    (all.values, program.map_or(0, |program| program.repeats()))
}

struct All {
    grads: GradientsParams,
    values: Vec<f32>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for All {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let Some(grad) = self.grads.remove::<B::InnerBackend, D>(param.id) else { return };
        self.values.extend(grad.into_data().iter::<f32>());
    }
}

/// The distance of two gradients, relative to the first.
fn distance(one: &[f32], other: &[f32]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let between = one.iter().zip(other).map(|(a, b)| f64::from(a - b));
    norm(&mut between.into_iter()) / norm(&mut one.iter().map(|value| f64::from(*value)))
}

/// The largest distance of recomputed gradients from those of the recorded step.
fn farthest<B, M>(device: &B::Device) -> f64
where
    B: AutodiffBackend + LazyBackend<Base: DeviceMemory>,
    M: Zoo<B> + TrainStep<Input = <M as Zoo<B>>::Batch> + AutodiffModule<B>,
{
    let model = M::new(device);
    initialize(&model);
    let (recorded, _) = gradients::<B, M>(&model, device, None);
    let (same, _) = gradients::<B, M>(&model, device, None);
    assert!(recorded == same && !recorded.is_empty(), "{} is repeatable", M::NAME);
    let mut most = 0;
    let distances = SHARES.map(|share| {
        let (again, repeats) = gradients::<B, M>(&model, device, Some(share));
        most = most.max(repeats);
        println!("{}: {repeats} calls again within {share}", M::NAME);
        if again == recorded { 0.0 } else { distance(&recorded, &again).max(f64::MIN_POSITIVE) }
    });
    assert!(most > 0, "{}: nothing was repeated", M::NAME);
    distances.into_iter().fold(0.0, f64::max)
}

macro_rules! models {
    ($($test:ident: $model:ident $(, $slow:literal)?;)*) => {$(
        mod $test {
            use super::*;

            #[test]
            #[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
            $(#[ignore = $slow])?
            fn has_the_same_bits_without_fusion() {
                let _alone = alone();
                let device = device();
                let farthest = farthest::<Unfused, zoo::$model<Unfused>>(&device);
                assert_eq!(farthest, 0.0);
            }

            #[test]
            #[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
            $(#[ignore = $slow])?
            fn is_close_with_fusion() {
                let _alone = alone();
                let device = device();
                let farthest = farthest::<Ours, zoo::$model<Ours>>(&device);
                println!("{}: {farthest:e} of the norm", stringify!($test));
                assert!(farthest <= 1e-6, "{farthest:e}");
            }
        }
    )*};
}

models! {
    cnn: Cnn;
    gpt: Gpt;
    unet: UNet, "slow on a GPU in software: `-- --ignored`";
    encoder: Encoder, "slow on a GPU in software: `-- --ignored`";
}

/// Trains on whole batches within a budget. Returns the plan and the memory.
fn train(items: usize, memory: Bytes) -> (PlanReport, MemoryUse) {
    type M = zoo::Gpt<Ours>;
    let device = device();
    let folder = tempfile::tempdir().expect("there is room for a folder");
    let numbers = |count| InMemDataset::new((0..count).collect::<Vec<usize>>());
    let loader = DataLoaderBuilder::<Ours, _, _>::new(Numbered::<M>::default());
    let none = DataLoaderBuilder::new(
        Numbered::<zoo::Gpt<<Ours as AutodiffBackend>::InnerBackend>>::default(),
    );
    let training = SupervisedTraining::new(
        folder.path(),
        loader.batch_size(items).build(numbers(2 * items)),
        none.batch_size(items).build(numbers(0)),
    );
    let training = training.renderer(CliMetricsRenderer::new()).num_epochs(2);
    let builder = Learner::builder().auto_batch().memory(memory).micro_batch(items).quiet();
    let learner = builder.build(M::new(&device), AdamConfig::new().init(), 1e-3);
    let fitted = learner.fit(training).expect("it fits");
    (fitted.report.expect("it trained"), fitted.memory.expect("it trained"))
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn what_is_reserved_is_what_was_predicted() {
    let _alone = alone();
    let (whole, _) = train(24, Bytes::gib(2));
    for share in [0.85, 0.7] {
        let budget = whole.predicted().scale(share);
        let (report, memory) = train(24, budget);
        let again = report.recomputed.expect("it computes tensors again");
        let measured = memory.measured.expect("the pool is measured");
        println!("{again}: {measured} of predicted {} of {budget}", memory.predicted);
        assert!(measured <= memory.predicted && memory.predicted <= budget, "{memory:?}");
    }
}
