//! Tests training loops of the user's own: their values against burn's, their plans, and what they
//! leave after an error.

mod parked;
mod proofs;
mod statistics;

use std::cell::Cell;

use burn::backend::{Autodiff, Flex};
use burn::data::dataloader::{DataLoaderBuilder, batcher::Batcher};
use burn::data::dataset::InMemDataset;
use burn::module::AutodiffModule;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::{Adam, AdamConfig, GradientsParams, Optimizer, adaptor::OptimizerAdaptor};
use burn::prelude::*;
use burn::tensor::Distribution;
use burn::tensor::backend::AutodiffBackend;
use firebox::train::{ByMicroBatch, Phase};
use firebox::{
    Bytes, Lazy, Learner, MicroBatch, StepPlanner, TrainError, WeightedGradients, is_rehearsal,
};

type Plain = Autodiff<Flex>;
type B = Autodiff<Lazy<Flex>>;

/// Pairs of inputs and targets.
#[derive(Clone, Debug, MicroBatch)]
struct Points<B: Backend> {
    inputs: Tensor<B, 2>,
    targets: Tensor<B, 2>,
}

/// `items` points that do not depend on the state of a generator.
fn points<B: Backend>(items: usize) -> Points<B> {
    let device = Default::default();
    let number = |i: usize| (i as f32 * 0.754_877_7).fract() - 0.5;
    let inputs = TensorData::new((0..items * 4).map(number).collect(), [items, 4]);
    let targets = TensorData::new((0..items).map(|i| number(i * 31 + 7)).collect(), [items, 1]);
    let (inputs, targets) =
        (Tensor::from_data(inputs, &device), Tensor::from_data(targets, &device));
    Points { inputs, targets }
}

/// Two networks, trained in turn.
#[derive(Module, Debug)]
struct Pair<B: Backend> {
    first: Linear<B>,
    second: Linear<B>,
    head: Linear<B>,
}

impl<B: Backend> Pair<B> {
    /// Weights that do not depend on the state of a generator.
    fn new() -> Self {
        let device = Default::default();
        let linear = |inputs: usize, outputs: usize| {
            let mut linear = LinearConfig::new(inputs, outputs).with_bias(false).init(&device);
            let number = |i: usize| (i as f32 * 0.618_034).fract() - 0.5;
            let weights = (0..inputs * outputs).map(number).collect();
            let weights = TensorData::new(weights, [inputs, outputs]);
            linear.weight = burn::module::Param::from_tensor(Tensor::from_data(weights, &device));
            linear
        };
        Self { first: linear(4, 64), second: linear(64, 64), head: linear(64, 1) }
    }

    fn loss(&self, points: Points<B>) -> Tensor<B, 1> {
        let x = self.first.forward(points.inputs).tanh();
        let x = self.second.forward(x).tanh();
        (self.head.forward(x) - points.targets).powi_scalar(2).mean()
    }
}

type Optim<B> = OptimizerAdaptor<Adam, Pair<B>, B>;

const RATE: f64 = 1e-2;

/// One step as burn's users write it: all parameters learn from the batch, then from half the loss.
fn plain_step<B: AutodiffBackend>(model: &mut Pair<B>, optim: &mut Optim<B>, points: Points<B>) {
    for scale in [1.0, 0.5] {
        let loss = model.loss(points.clone()) * scale;
        let grads = GradientsParams::from_grads(loss.backward(), model);
        *model = optim.step(RATE, model.clone(), grads);
    }
}

/// The same through a planner.
fn step(
    steps: &mut StepPlanner<B, Pair<B>, ByMicroBatch>,
    model: &mut Pair<B>,
    optim: &mut Optim<B>,
    batch: &Points<B>,
) -> Result<usize, TrainError> {
    let parts_run = Cell::new(0);
    steps.step(model, optim, batch, |model, optim, parts| {
        for scale in [1.0, 0.5] {
            let mut gradients = WeightedGradients::mean(parts.weight());
            parts.each(
                model,
                |model, points| {
                    let loss = model.loss(points) * scale;
                    GradientsParams::from_grads(loss.backward(), model)
                },
                |model, grads, weight| {
                    gradients.add(model, grads, weight);
                    parts_run.set(parts_run.get() + usize::from(!is_rehearsal()));
                },
            )?;
            let grads = gradients.finish(model);
            parts.update(model, |model| *model = optim.step(RATE, model.clone(), grads))?;
        }
        Ok(parts_run.get())
    })
}

fn weights<B: Backend>(model: &Pair<B>) -> Vec<f32> {
    let of = |linear: &Linear<B>| linear.weight.val().into_data().to_vec::<f32>().expect("floats");
    [&model.first, &model.second, &model.head].into_iter().flat_map(of).collect()
}

/// The weights after five steps on 40 points, and the number of micro-batches of a step.
fn trained(micro_batch: usize) -> (Vec<f32>, usize) {
    let (mut model, mut optim) = (Pair::<B>::new(), AdamConfig::new().init());
    let builder = Learner::builder().auto_batch().memory(Bytes::mib(64)).quiet();
    let mut steps = builder.micro_batch(micro_batch).step_planner(&model).expect("it is ready");
    let ran = (0..5).map(|_| step(&mut steps, &mut model, &mut optim, &points(40)));
    let ran: Vec<usize> = ran.collect::<Result<_, _>>().expect("it fits");
    assert!(ran.windows(2).all(|ran| ran[0] == ran[1]) && steps.plans().len() == 1, "{ran:?}");
    (weights(&model), ran[0] / 2)
}

#[test]
fn a_step_that_is_not_split_is_burns_to_the_bit() {
    let (mut model, mut optim) = (Pair::<Plain>::new(), AdamConfig::new().init());
    (0..5).for_each(|_| plain_step(&mut model, &mut optim, points(40)));
    let (weights_of_ours, parts) = trained(40);
    assert_eq!(parts, 1);
    assert_eq!(weights_of_ours, weights(&model));
}

#[test]
fn a_split_step_learns_what_the_whole_one_does() {
    let (whole, _) = trained(40);
    for (micro_batch, expected) in [(7, 6), (13, 4), (1, 40)] {
        let (split, parts) = trained(micro_batch);
        assert_eq!(parts, expected);
        let difference = whole.iter().zip(&split).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(difference < 1e-4 && whole != split, "{difference} with {micro_batch}");
    }
}

#[test]
fn a_budget_splits_the_batch() {
    let (mut model, mut optim) = (Pair::<B>::new(), AdamConfig::new().init());
    let builder = Learner::builder().auto_batch().memory(Bytes::mib(3)).quiet();
    let mut steps = builder.step_planner(&model).expect("it is ready");
    let ran = step(&mut steps, &mut model, &mut optim, &points(4000)).expect("a part of it fits");
    let plan = &steps.plans()[0];
    assert!(plan.plan.len() > 1 && ran == 2 * plan.plan.len(), "{plan}");
    assert!(plan.predicted() <= Bytes::mib(3), "{plan}");
    // Both updates count: Adam's moments of all weights.
    assert_eq!(plan.optimizer_state, Bytes::new(2 * 4 * (4 + 64 + 1) * 64));
    // Gradients have the paths of their parameters.
    let modules: Vec<_> = plan.modules.iter().filter_map(|held| held.module.as_deref()).collect();
    assert!(modules.contains(&"second"), "{modules:?}");
    assert_eq!(steps.memory().predicted, plan.predicted());
}

#[test]
fn a_batch_that_does_not_fit_leaves_the_model_as_it_was() {
    let (mut model, mut optim) = (Pair::<B>::new(), AdamConfig::new().init());
    let before = weights(&model);
    let builder = Learner::builder().auto_batch().memory(Bytes::kib(300)).quiet();
    let mut steps = builder.step_planner(&model).expect("it is ready");
    let error = step(&mut steps, &mut model, &mut optim, &points(40)).expect_err("too small");
    assert!(matches!(error, TrainError::Plan { .. }), "{error}");
    assert_eq!(weights(&model), before);
}

#[test]
fn empty_batches_and_panics_are_errors() {
    let (mut model, mut optim) = (Pair::<B>::new(), AdamConfig::new().init());
    let builder = Learner::builder().auto_batch().memory(Bytes::mib(64)).quiet();
    let mut steps = builder.step_planner(&model).expect("it is ready");
    let empty = points(0);
    let error = step(&mut steps, &mut model, &mut optim, &empty).expect_err("it has no items");
    assert!(matches!(error, TrainError::EmptyBatch { .. }), "{error}");

    let before = weights(&model);
    let panics = |_: &Pair<B>, _: Points<B>| -> GradientsParams { panic!("on purpose") };
    let error = steps.step(&mut model, &mut optim, &points(8), |model, _, parts| {
        parts.each(model, panics, |_, _, _| ())
    });
    let error = error.expect_err("it panics");
    assert!(matches!(&error, TrainError::StepPanicked { message, .. } if message == "on purpose"));
    // An error of the step's own.
    let error = steps.step(&mut model, &mut optim, &points::<B>(8), |_, _, _| {
        Err::<(), _>(TrainError::EmptyLoader)
    });
    assert!(matches!(error, Err(TrainError::EmptyLoader)));
    assert_eq!(weights(&model), before);
    // It goes on.
    step(&mut steps, &mut model, &mut optim, &points(8)).expect("it fits");
    assert_ne!(weights(&model), before);
}

#[test]
fn an_optimizer_that_panics_is_an_error() {
    let (mut model, mut optim) = (Pair::<B>::new(), AdamConfig::new().init::<B, Pair<B>>());
    let builder = Learner::builder().auto_batch().memory(Bytes::mib(64)).quiet();
    let mut steps = builder.step_planner(&model).expect("it is ready");
    let error = steps.step(&mut model, &mut optim, &points::<B>(8), |model, _, parts| {
        parts.update(model, |_| assert!(is_rehearsal(), "on purpose"))
    });
    let error = error.expect_err("it panics");
    assert!(matches!(&error, TrainError::OptimizerPanicked { message } if message == "on purpose"));
}

/// A batch norm in front of a linear layer.
#[derive(Module, Debug)]
struct Normed<B: Backend> {
    norm: BatchNorm<B>,
    linear: Linear<B>,
}

#[derive(Clone)]
struct Numbers;

impl<B: Backend> Batcher<B, f32, Points<B>> for Numbers {
    fn batch(&self, items: Vec<f32>, device: &B::Device) -> Points<B> {
        let targets = Tensor::<B, 1>::from_floats(items.as_slice(), device).unsqueeze_dim(1);
        Points { inputs: targets.clone().repeat_dim(1, 4), targets }
    }
}

#[test]
fn loaders_with_workers_bring_all_batches() {
    let (mut model, mut optim) = (Pair::<B>::new(), AdamConfig::new().init());
    let builder = Learner::builder().auto_batch().memory(Bytes::mib(64)).quiet();
    let mut steps = builder.step_planner(&model).expect("it is ready");
    let loader = DataLoaderBuilder::<B, _, _>::new(Numbers)
        .batch_size(16)
        .num_workers(2)
        .build(InMemDataset::new((0..200).map(|i| i as f32).collect()));
    for _ in 0..3 {
        let mut sum = 0.0;
        for batch in steps.batches(&*loader) {
            sum += batch.targets.clone().sum().into_scalar();
            step(&mut steps, &mut model, &mut optim, &batch).expect("it fits");
        }
        assert_eq!(sum, 19_900.0);
    }
    // Two workers have 100 items each, and the last batch of each has four.
    assert_eq!(steps.plans().len(), 2);
    assert!(steps.plans()[0].overhead.queued > Bytes::ZERO);
}

#[test]
fn validation_is_split_and_has_the_loss_of_the_whole_batch() {
    let model = Pair::<B>::new();
    let valid = model.valid();
    let batch = points::<Lazy<Flex>>(2000);
    let whole = f64::from(valid.loss(batch.clone()).into_scalar());
    let builder = || Learner::builder().auto_batch().quiet();
    let steps = |builder: firebox::LearnerBuilder<ByMicroBatch, ByMicroBatch>| {
        builder.step_planner::<B, _>(&model).expect("it is ready")
    };
    let loss = |steps: &mut StepPlanner<B, Pair<B>, ByMicroBatch>| {
        let (mut sum, mut parts, mut steps_run) = (0.0, 0, 0);
        let step = |model: &Pair<Lazy<Flex>>, points| {
            steps_run += usize::from(!is_rehearsal());
            model.loss(points)
        };
        let ran = steps.validate(&valid, &batch, step, |loss, weight| {
            sum += f64::from(loss.into_scalar()) * weight;
            parts += 1;
        });
        ran.expect("it fits");
        assert_eq!(parts, steps_run, "the sink is called for what runs");
        (sum / 2000.0, parts)
    };
    let mut large = steps(builder().memory(Bytes::gib(1)));
    assert_eq!(loss(&mut large), (whole, 1));
    let needed = large.plans()[0].predicted();
    let mut small = steps(builder().memory(needed.scale(0.7)));
    for _ in 0..2 {
        let (split, parts) = loss(&mut small);
        assert!(parts > 1 && (split - whole).abs() < 1e-6 * whole, "{split} and {whole}, {parts}");
    }
    assert_eq!(small.plans().len(), 1, "a shape is planned once");
    assert!(small.plans()[0].predicted() <= needed.scale(0.7));
}

#[test]
fn validation_between_steps_learns_nothing() {
    let alone = trained(40).0;
    let (mut model, mut optim) = (Pair::<B>::new(), AdamConfig::new().init());
    let builder = Learner::builder().auto_batch().memory(Bytes::mib(64)).quiet();
    let mut steps = builder.micro_batch(40).step_planner(&model).expect("it is ready");
    for _ in 0..5 {
        step(&mut steps, &mut model, &mut optim, &points(40)).expect("it fits");
        let mut losses = Vec::new();
        let ran = steps.validate(
            &model.valid(),
            &points::<Lazy<Flex>>(90),
            |model, points| model.loss(points),
            |loss, weight| losses.push((loss.into_scalar(), weight)),
        );
        ran.expect("it fits");
        assert_eq!(losses.iter().map(|(_, weight)| weight).sum::<f64>(), 90.0);
    }
    assert_eq!(weights(&model), alone);
    assert_eq!(steps.plans().len(), 2, "one for training, one for validation");
}

#[test]
fn a_validation_that_panics_or_has_no_items_is_an_error() {
    let model = Pair::<B>::new();
    let builder = Learner::builder().auto_batch().memory(Bytes::mib(64)).quiet();
    let mut steps = builder.step_planner::<B, _>(&model).expect("it is ready");
    let valid = model.valid();
    let mut run = |items: usize, fails: bool| {
        let step = |model: &Pair<_>, points| {
            assert!(!fails, "a step that fails");
            model.loss(points)
        };
        steps.validate(&valid, &points::<Lazy<Flex>>(items), step, |_, _| ())
    };
    let none = run(0, false).unwrap_err();
    assert!(matches!(none, TrainError::EmptyBatch { phase: Phase::Validation }), "{none}");
    let failed = run(8, true).unwrap_err();
    assert!(failed.to_string().contains("a step that fails"), "{failed}");
    run(8, false).expect("it goes on");
}

#[test]
fn a_model_for_validation_needs_no_plan() {
    let model = Pair::<B>::new().valid();
    let noise = Tensor::<Lazy<Flex>, 2>::random([4, 4], Distribution::Default, &Default::default());
    let points = Points { targets: noise.clone().narrow(1, 0, 1), inputs: noise };
    assert!(model.loss(points).into_scalar().is_finite());
}

#[test]
fn the_state_of_all_optimizers_is_planned() {
    let mut model = Pair::<B>::new();
    let adam = || AdamConfig::new().init::<B, Linear<B>>();
    let mut optims = (adam(), adam());
    let builder = Learner::builder().auto_batch().memory(Bytes::mib(64)).quiet();
    let mut steps = builder.step_planner(&model).expect("it is ready");
    let gradients = |model: &Pair<B>, points: Points<B>| {
        let mut grads = model.loss(points).backward();
        (
            GradientsParams::from_module(&mut grads, &model.first),
            GradientsParams::from_module(&mut grads, &model.second),
        )
    };
    for _ in 0..2 {
        let ran = steps.step(&mut model, &mut optims, &points(40), |model, (one, two), parts| {
            let mut sums = [(); 2].map(|()| WeightedGradients::mean(parts.weight()));
            parts.each(model, gradients, |model, (first, second), weight| {
                sums[0].add(&model.first, first, weight);
                sums[1].add(&model.second, second, weight);
            })?;
            let first = sums[0].finish(&model.first);
            parts.update(model, |model| {
                model.first = one.step(RATE, model.first.clone(), first);
            })?;
            let second = sums[1].finish(&model.second);
            parts.update(model, |model| {
                model.second = two.step(RATE, model.second.clone(), second);
            })
        });
        ran.expect("it fits");
    }
    assert_eq!(steps.plans()[0].optimizer_state, Bytes::new(2 * 4 * (4 + 64) * 64));
}

#[test]
fn steps_are_logged() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("steps.jsonl");
    let (mut model, mut optim) = (Pair::<B>::new(), AdamConfig::new().init());
    let builder = Learner::builder().auto_batch().memory(Bytes::mib(64)).quiet().log_json(&path);
    let mut steps = builder.micro_batch(16).step_planner(&model).expect("it is ready");
    for _ in 0..3 {
        step(&mut steps, &mut model, &mut optim, &points(40)).expect("it fits");
    }
    let text = std::fs::read_to_string(&path).expect("it was written");
    let lines: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(lines.len(), 3, "{text}");
    let predicted = steps.plans()[0].predicted().get();
    for (line, iteration) in lines.iter().zip(1..) {
        assert_eq!(
            (line["iteration"].as_u64(), line["items"].as_u64()),
            (Some(iteration), Some(40))
        );
        assert_eq!(line["micro_batches"].as_u64(), Some(3));
        assert_eq!(line["predicted"].as_u64(), Some(predicted));
        assert_eq!(line["budget"].as_u64(), Some(64 << 20));
        assert!(line["items_per_second"].as_f64().is_some_and(|items| items > 0.0));
        assert!(line["epoch"].is_null());
    }
    // A file that cannot be written is an error before anything runs.
    let builder = Learner::builder().auto_batch().memory(Bytes::mib(64)).log_json(folder.path());
    let error = builder.step_planner(&model).err().expect("a folder is no file");
    assert!(matches!(error, TrainError::LogNotWritten { .. }), "{error}");
}
