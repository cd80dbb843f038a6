//! Compares, before a batch is split for the first time, the gradient of a few items with that of
//! two parts of them.

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn::train::{Learner, LearnerModel, TrainStep};
use firebox_batch::MicroBatch;

use crate::error::TrainError;
use crate::gradients::{LossReduction, WeightedGradients};
use crate::rehearsal::unchanged;

/// How many items are compared at the most, and how many of them are the first part.
const ITEMS: (usize, usize) = (8, 3);

/// Where a gradient is zero but for rounding, this share of the largest one is.
const ROUNDING: f64 = 1e-5;

/// The difference, relative to the largest gradient of a parameter, that is rounding.
const TOLERANCE: f64 = 1e-3;

/// Whether the gradient of a split batch is known to be that of the whole batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum SplitCheck {
    /// No batch was split.
    #[default]
    NotNeeded,
    /// The gradient of a few items was that of their parts.
    Agreed,
    /// It was not, and the user accepts that.
    Accepted,
    /// Items have two different gradients, because the step draws numbers, such as a dropout.
    Random,
    /// Batch normalization makes the gradient of an item depend on the others.
    BatchNorm,
}

/// Checks on the first items of a batch, at most `most` of them, which fit.
///
/// # Errors
///
/// [`TrainError::Coupled`] if the gradient is not that of the parts.
pub(crate) fn check<M>(
    learner: &Learner<M>,
    batch: &<M as TrainStep>::Input,
    most: usize,
    reduction: LossReduction,
) -> Result<SplitCheck, TrainError>
where
    M: LearnerModel,
    <M as TrainStep>::Input: MicroBatch,
{
    let model = learner.model();
    if has_batch_norm(&model) {
        return Ok(SplitCheck::BatchNorm);
    }
    let all = ITEMS.0.min(most);
    let first = ITEMS.1.min(all / 2);
    let few = batch.range(0..all);
    // Nothing is told by items that weigh nothing.
    if reduction == LossReduction::Mean && few.weight() == 0.0 {
        return Ok(SplitCheck::NotNeeded);
    }
    let of_all = || read(&model, learner.train_step(few.range(0..all)).grads);
    unchanged(&model, || {
        let whole = of_all();
        let is_same = |(one, other): (&Of, &Of)| {
            one.1.iter().zip(&other.1).all(|(one, other)| one.to_bits() == other.to_bits())
        };
        if !of_all().iter().zip(&whole).all(is_same) {
            return Ok(SplitCheck::Random);
        }
        let mut gradients = WeightedGradients::new(reduction, few.weight());
        for part in [0..first, first..all] {
            let part = few.range(part);
            let weight = part.weight();
            gradients.add(&model, learner.train_step(part).grads, weight);
        }
        let parts = read(&model, gradients.finish(&model));
        match difference(&whole, &parts) {
            Some((parameter, by)) if by > TOLERANCE => {
                Err(TrainError::Coupled { parameter, percent: 100.0 * by })
            }
            _ => Ok(SplitCheck::Agreed),
        }
    })
}

/// The gradient of a parameter, with its path.
type Of = (String, Vec<f32>);

/// A gradient, in the order of the model.
type Read = Vec<Of>;

/// The parameter whose gradients differ most, and by how much of its largest gradient. A gradient
/// that is zero but for rounding, such as that of an attention's key bias, has no size of its own.
fn difference(one: &Read, other: &Read) -> Option<(String, f64)> {
    let largest = |numbers: &[f32]| {
        numbers.iter().fold(0.0_f64, |most, value| most.max(f64::from(value.abs())))
    };
    let least = one.iter().map(|(_, numbers)| largest(numbers)).fold(0.0, f64::max);
    let least = least * ROUNDING / TOLERANCE;
    let of = |(one, other): (&Of, &Of)| {
        let ((path, one), (_, other)) = (one, other);
        let apart: Vec<f32> = one.iter().zip(other).map(|(one, other)| one - other).collect();
        let is_number = apart.iter().all(|value| value.is_finite());
        let apart = if is_number { largest(&apart) } else { f64::NAN };
        let largest = largest(one).max(least);
        // What is not finite differs.
        let by = if apart == 0.0 { 0.0 } else { apart / largest };
        (path.clone(), if by.is_nan() { f64::INFINITY } else { by })
    };
    one.iter().zip(other).map(of).max_by(|one, other| one.1.total_cmp(&other.1))
}

fn read<M: Module>(model: &M, grads: GradientsParams) -> Read {
    struct Reading {
        path: Vec<String>,
        grads: GradientsParams,
        read: Read,
    }

    impl ModuleVisitor for Reading {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(grad) = self.grads.remove::<D>(param.id) {
                let numbers = grad.into_data().iter::<f32>().collect();
                self.read.push((self.path.join("."), numbers));
            }
        }

        fn enter_module(&mut self, name: &str, _container: &str) {
            self.path.push(name.to_owned());
        }

        fn exit_module(&mut self, _name: &str, _container: &str) {
            self.path.pop();
        }
    }

    let mut reading = Reading { path: Vec::new(), grads, read: Vec::new() };
    model.visit(&mut reading);
    reading.read
}

fn has_batch_norm<M: Module>(model: &M) -> bool {
    struct Found(bool);

    impl ModuleVisitor for Found {
        fn enter_module(&mut self, _name: &str, container: &str) {
            self.0 |= container == "Struct:BatchNorm";
        }
    }

    let mut found = Found(false);
    model.visit(&mut found);
    found.0
}
