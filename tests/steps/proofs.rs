//! Batches of a loop of the user's own are split where the recorded step shows that this is exact.

use burn::optim::SgdConfig;
use burn::tensor::activation::log_softmax;
use firebox::{Coupling, LearnerBuilder, LossReduction, SplitCheck};

use super::*;

/// Items with a class, and the weight that the batch states, if it states one.
#[derive(Clone, Debug, MicroBatch)]
#[micro_batch(weight = Self::stated)]
struct Classes<B: Backend> {
    inputs: Tensor<B, 2>,
    classes: Tensor<B, 1, Int>,
    #[micro_batch(shared)]
    states: bool,
}

impl<B: Backend> Classes<B> {
    fn stated(&self) -> f64 {
        match self.states {
            true => f64::from(self.classes.clone().sum().into_scalar().elem::<f32>()),
            false => self.classes.dims()[0] as f64,
        }
    }
}

const ITEMS: usize = 37;

fn classes(states: bool) -> Classes<B> {
    let device = Default::default();
    let Points { inputs, .. } = points(ITEMS);
    let classes: Vec<i64> = (0..ITEMS).map(|i| (i * i % 7 % 3) as i64).collect();
    let classes = Tensor::from_data(TensorData::new(classes, [ITEMS]), &device);
    Classes { inputs, classes, states }
}

/// A model of two networks, of which each pass trains one.
fn outputs<B: Backend>(model: &Pair<B>, inputs: Tensor<B, 2>) -> Tensor<B, 2> {
    model.second.forward(model.first.forward(inputs).tanh())
}

/// The mean of cross entropies by the weights of their classes.
fn by_class<B: Backend>(model: &Pair<B>, batch: &Classes<B>) -> Tensor<B, 1> {
    let weights = Tensor::<B, 1>::from_floats([0.2, 1.0, 3.5], &Default::default());
    let weights = weights.select(0, batch.classes.clone());
    let of_item = log_softmax(outputs(model, batch.inputs.clone()), 1);
    let of_item = of_item.gather(1, batch.classes.clone().unsqueeze_dim(1)).squeeze_dim::<1>(1);
    -(of_item * weights.clone()).sum() / weights.sum()
}

/// A root of a mean, which is no mean.
fn root(model: &Pair<B>, batch: &Classes<B>) -> Tensor<B, 1> {
    outputs(model, batch.inputs.clone()).powi_scalar(2).mean().sqrt()
}

fn mean(model: &Pair<B>, batch: &Classes<B>) -> Tensor<B, 1> {
    outputs(model, batch.inputs.clone()).powi_scalar(2).mean()
}

fn sum(model: &Pair<B>, batch: &Classes<B>) -> Tensor<B, 1> {
    outputs(model, batch.inputs.clone()).powi_scalar(2).sum() * 0.02
}

type Loss = fn(&Pair<B>, &Classes<B>) -> Tensor<B, 1>;

struct Trained {
    weights: Vec<f32>,
    micro_batches: usize,
    found: SplitCheck,
}

fn builder() -> LearnerBuilder<ByMicroBatch, ByMicroBatch> {
    Learner::builder().auto_batch().memory(Bytes::mib(64)).quiet()
}

/// Trains for two steps. In each, `first` is learned from `losses[0]` and then `second` from
/// `losses[1]`, which sees the new `first`.
fn train(
    builder: LearnerBuilder<ByMicroBatch, ByMicroBatch>,
    losses: [Loss; 2],
    states: bool,
) -> Result<Trained, TrainError> {
    train_with(builder, losses, (LossReduction::Mean, states), |_| ())
}

fn train_with(
    builder: LearnerBuilder<ByMicroBatch, ByMicroBatch>,
    losses: [Loss; 2],
    (reduction, states): (LossReduction, bool),
    look: impl Fn(Tensor<Lazy<Flex>, 1>),
) -> Result<Trained, TrainError> {
    let mut model = Pair::<B>::new();
    let sgd = || SgdConfig::new().init::<B, Linear<B>>();
    let mut optims = (sgd(), sgd());
    let mut steps = builder.step_planner(&model).expect("it is ready");
    let ran = Cell::new(0);
    let batch = classes(states);
    let gradients = |loss: Tensor<B, 1>, part: &Linear<B>| {
        let grads = GradientsParams::from_module(&mut loss.backward(), part);
        (grads, loss.inner())
    };
    for _ in 0..2 {
        steps.step(&mut model, &mut optims, &batch, |model, (one, two), parts| {
            let total = parts.weight();
            let new = || match reduction {
                LossReduction::Mean => WeightedGradients::mean(total),
                LossReduction::Sum => WeightedGradients::sum(),
            };
            let mut added = new();
            parts.each(
                model,
                |model, batch| gradients(losses[0](model, &batch), &model.first),
                |model, (grads, loss), weight| {
                    ran.set(ran.get() + usize::from(!is_rehearsal()));
                    added.add(&model.first, grads, weight);
                    look(loss);
                },
            )?;
            let grads = added.finish(&model.first);
            parts.update(model, |model| model.first = one.step(0.5, model.first.clone(), grads))?;
            let mut added = new();
            parts.each(
                model,
                |model, batch| gradients(losses[1](model, &batch), &model.second),
                |model, (grads, _), weight| added.add(&model.second, grads, weight),
            )?;
            let grads = added.finish(&model.second);
            parts.update(model, |model| model.second = two.step(0.5, model.second.clone(), grads))
        })?;
    }
    let found = steps.split_check().clone();
    Ok(Trained { weights: weights(&model), micro_batches: ran.get() / 2, found })
}

#[track_caller]
fn are_equal(one: &[f32], other: &[f32]) {
    let difference = one.iter().zip(other).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(difference < 2e-6, "{difference}");
}

#[test]
fn parts_are_given_the_numbers_of_their_batch() {
    for losses in [[by_class as Loss, mean], [mean, by_class], [by_class, by_class]] {
        let whole = train(builder().micro_batch(ITEMS), losses, false).expect("it fits");
        assert_eq!((whole.micro_batches, whole.found), (1, SplitCheck::NotNeeded));
        for size in [5, 12, 18] {
            let split = train(builder().micro_batch(size), losses, false).expect("it is exact");
            assert_eq!(split.found, SplitCheck::Proved);
            assert_eq!(split.micro_batches, ITEMS.div_ceil(size));
            are_equal(&whole.weights, &split.weights);
        }
    }
}

#[test]
fn sums_are_added_up_as_they_are() {
    let train_sums = |size| {
        let builder = builder().micro_batch(size).reduction(LossReduction::Sum);
        train_with(builder, [sum, sum], (LossReduction::Sum, false), |_| ()).expect("it is exact")
    };
    let (whole, split) = (train_sums(ITEMS), train_sums(8));
    assert_eq!(split.found, SplitCheck::Proved);
    are_equal(&whole.weights, &split.weights);
    let error = train(builder().micro_batch(8), [mean, sum], false).err().expect("it is no mean");
    assert!(matches!(&error, TrainError::Coupled { coupling: Coupling::Sum, .. }), "{error}");
}

#[test]
fn coupled_items_stay_together_or_are_an_error() {
    let unsplit = train(builder().micro_batch(ITEMS), [mean, root], false).expect("it fits");
    let error = train(builder().micro_batch(8), [mean, root], false).err().expect("it is no mean");
    let TrainError::Coupled { coupling: Coupling::Items, by: None, at: Some(at), .. } = &error
    else {
        panic!("{error}")
    };
    assert!(at.contains("float_powf_scalar") && at.contains("second"), "{at}");
    let accepted = builder().micro_batch(8).split_although(Coupling::Items);
    let accepted = train(accepted, [mean, root], false).expect("it is accepted");
    assert_eq!(accepted.found, SplitCheck::Accepted(Coupling::Items));
    assert!(accepted.weights != unsplit.weights);
}

#[test]
fn a_coupled_batch_that_could_be_split_is_recomputed_instead() {
    let learned = |builder: LearnerBuilder<ByMicroBatch, ByMicroBatch>| {
        let (mut model, mut optim) = (Pair::<B>::new(), AdamConfig::new().init::<B, Pair<B>>());
        let mut steps = builder.step_planner(&model).expect("it is ready");
        let ran = steps.step(&mut model, &mut optim, &points(4000), |model, optim, parts| {
            let mut added = WeightedGradients::mean(parts.weight());
            let loss = |model: &Pair<B>, points| {
                GradientsParams::from_grads(model.loss(points).sqrt().backward(), model)
            };
            parts.each(model, loss, |model, grads, weight| added.add(model, grads, weight))?;
            let grads = added.finish(model);
            parts.update(model, |model| *model = optim.step(RATE, model.clone(), grads))
        });
        ran.expect("it fits");
        let plan = steps.plans().last().expect("there is one");
        assert!(plan.plan.is_whole() && steps.plans().len() == 1);
        (weights(&model), plan.predicted(), plan.recomputed.is_some())
    };
    let (all, needed, recomputes) = learned(builder());
    assert!(!recomputes);
    let (less, predicted, recomputes) = learned(builder().memory(needed.scale(0.9)));
    assert!(recomputes && predicted <= needed.scale(0.9) && all == less);
}

#[test]
fn a_weight_that_the_step_does_not_have_is_an_error() {
    let error =
        train(builder().micro_batch(8), [mean, mean], true).err().expect("it weighs otherwise");
    let TrainError::OtherWeights { items, stated, counted } = &error else { panic!("{error}") };
    assert!(*items == (0..8) && (counted - 8.0 / 37.0).abs() < 1e-6 && stated != counted);
}

#[test]
fn a_validation_in_parts_shows_the_loss_of_its_batch() {
    let model = Pair::<B>::new();
    let Classes { inputs, classes, .. } = classes(false);
    let (inputs, classes) = (inputs.inner(), classes.inner());
    let batch = Classes::<Lazy<Flex>> { inputs, classes, states: false };
    let loss = |model: &Pair<_>, batch| by_class::<Lazy<Flex>>(model, &batch);
    let shown = |size: usize| {
        let mut steps = builder().micro_batch(size).step_planner::<B, _>(&model).expect("ready");
        let (mut sum, mut parts) = (0.0, 0);
        let ran = steps.validate(&model.valid(), &batch, loss, |loss, weight| {
            sum += f64::from(loss.into_scalar()) * weight / ITEMS as f64;
            parts += 1;
        });
        ran.expect("it fits");
        assert_eq!(parts, ITEMS.div_ceil(size));
        sum
    };
    let whole = shown(ITEMS);
    for size in [1, 5, 20] {
        assert!((shown(size) - whole).abs() < 1e-5 * whole, "{size}");
    }
}

#[test]
fn what_is_read_behind_a_pass_does_not_matter() {
    let split = train_with(
        builder().micro_batch(8),
        [by_class, mean],
        (LossReduction::Mean, false),
        |loss| assert!(loss.into_scalar().is_finite()),
    );
    assert_eq!(split.expect("it is exact").found, SplitCheck::Proved);
}

#[test]
fn what_cannot_be_shown_is_said() {
    let reads: Loss = |model, batch| {
        let loss = mean(model, batch);
        let scale = loss.clone().into_scalar();
        loss * (1.0 + scale * 0.0)
    };
    let split = train(builder().micro_batch(8), [reads, mean], false).expect("it runs");
    assert_eq!(split.found, SplitCheck::Unknown("the step reads values".to_owned()));

    let (mut model, mut optim) = (Pair::<B>::new(), AdamConfig::new().init::<B, Pair<B>>());
    let mut steps = builder().micro_batch(8).step_planner(&model).expect("it is ready");
    let ran = steps.step(&mut model, &mut optim, &points(ITEMS), |model, optim, parts| {
        let mut all = Vec::new();
        parts.each(
            model,
            |model, points| GradientsParams::from_grads(model.loss(points).backward(), model),
            |_, grads, _| all.push(grads),
        )?;
        let last = all.pop().expect("there was one");
        parts.update(model, |model| *model = optim.step(RATE, model.clone(), last))
    });
    ran.expect("it runs");
    let SplitCheck::Unknown(why) = steps.split_check() else { panic!("it has no gradients") };
    assert!(why.contains("WeightedGradients"), "{why}");
}

/// Trains a step for each of `losses` on a loop with one pass, and says what is known of splits.
/// `change` is done to gradients before they are added.
fn one_pass(
    losses: &[Loss],
    states: bool,
    size: usize,
    change: impl Fn(GradientsParams, &Pair<B>) -> GradientsParams,
) -> (Vec<f32>, SplitCheck) {
    let (mut model, mut optim) = (Pair::<B>::new(), SgdConfig::new().init::<B, Pair<B>>());
    let mut steps = builder().micro_batch(size).step_planner(&model).expect("it is ready");
    for loss in losses {
        let ran = steps.step(&mut model, &mut optim, &classes(states), |model, optim, parts| {
            let mut added = WeightedGradients::mean(parts.weight());
            let step = |model: &Pair<B>, batch| {
                let loss = loss(model, &batch);
                if !is_rehearsal() {
                    assert!(loss.device() == Default::default());
                }
                GradientsParams::from_grads(loss.backward(), model)
            };
            parts.each(model, step, |model, grads, weight| {
                added.add(model, change(grads, model), weight);
            })?;
            let grads = added.finish(model);
            parts.update(model, |model| *model = optim.step(0.5, model.clone(), grads))
        });
        ran.expect("it runs");
    }
    (weights(&model), steps.split_check().clone())
}

#[test]
fn a_step_that_becomes_another_program_is_proved_again() {
    let two: Loss = |model, batch| by_class(model, batch) + mean(model, batch);
    let losses = [by_class as Loss, two, two, by_class];
    let as_it_is = |grads, _: &Pair<B>| grads;
    let (whole, _) = one_pass(&losses, false, ITEMS, as_it_is);
    let (split, found) = one_pass(&losses, false, 7, as_it_is);
    // The step in which it is another one is not proved.
    let SplitCheck::Unknown(why) = found else { panic!("{found:?}") };
    assert!(why.contains("another program"), "{why}");
    let apart = whole.iter().zip(&split).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(apart > 1e-5 && apart < 0.05, "{apart}");
    let (again, _) = one_pass(&losses[..1], false, 7, as_it_is);
    are_equal(&one_pass(&losses[..1], false, ITEMS, as_it_is).0, &again);
    // One that is not looked at is told.
    let (_, found) = one_pass(&[mean as Loss, root], false, 7, as_it_is);
    assert!(matches!(found, SplitCheck::Unknown(why) if why.contains("another program")));
    // A coupled one is refused once it is looked at.
    let caught =
        std::panic::catch_unwind(|| one_pass(&[mean as Loss, root, root], false, 7, as_it_is));
    let message = caught.expect_err("it is refused").downcast::<String>().expect("a text");
    assert!(message.contains("float_powf_scalar"), "{message}");
}

#[test]
fn gradients_that_are_changed_before_they_are_added_are_not_proved() {
    let halved = |grads: GradientsParams, model: &Pair<B>| {
        let mut changed = grads;
        let of = changed.remove::<Lazy<Flex>, 2>(model.first.weight.id).expect("it has one");
        changed.register::<Lazy<Flex>, 2>(model.first.weight.id, of * 0.5);
        changed
    };
    let (_, found) = one_pass(&[mean as Loss], false, 7, halved);
    let SplitCheck::Unknown(why) = found else { panic!("{found:?}") };
    assert!(why.contains("changed"), "{why}");
}

#[test]
fn a_pass_of_means_beside_one_of_sums_is_given_its_numbers() {
    let learned = |size: usize| {
        let (mut model, mut optim) = (Pair::<B>::new(), SgdConfig::new().init::<B, Pair<B>>());
        let mut steps = builder().micro_batch(size).step_planner(&model).expect("it is ready");
        let ran = steps.step(&mut model, &mut optim, &classes(false), |model, optim, parts| {
            let sums = [WeightedGradients::mean(parts.weight()), WeightedGradients::sum()];
            for (mut added, loss) in sums.into_iter().zip([by_class as Loss, sum]) {
                let step = |model: &Pair<B>, batch| {
                    GradientsParams::from_grads(loss(model, &batch).backward(), model)
                };
                parts.each(model, step, |model, grads, weight| added.add(model, grads, weight))?;
                let grads = added.finish(model);
                parts.update(model, |model| *model = optim.step(0.1, model.clone(), grads))?;
            }
            Ok(())
        });
        ran.expect("it runs");
        (weights(&model), steps.split_check().clone())
    };
    let (whole, _) = learned(ITEMS);
    let (split, found) = learned(6);
    assert_eq!(found, SplitCheck::Proved);
    are_equal(&whole, &split);
}
