//! Compares gradients before a batch is split: of a few items with two parts of them, and of the
//! batch as it is to be cut with the batch cut elsewhere.

use std::collections::BTreeMap;
use std::ops::Range;

use burn::module::{Module, ModuleVisitor};
use burn::optim::GradientsParams;
use burn::tensor::ExecutionError;
use burn::train::{Learner, LearnerModel, TrainStep};
use firebox_batch::MicroBatch;

use crate::error::TrainError;
use crate::gradients::{LossReduction, WeightedGradients, each_of, largest_of};
use crate::rehearsal::unchanged;

/// How many items are compared at the most, and how many of them are the first part.
const ITEMS: (usize, usize) = (8, 3);

/// Where a gradient is zero but for rounding, this share of the largest one is.
const ROUNDING: f64 = 1e-5;

/// The difference between a few items and their parts, relative to the largest gradients of a
/// parameter, that is rounding.
const TOLERANCE: f64 = 1e-3;

/// In how many places of a batch a few items are looked for whose gradient tells something.
const PLACES: usize = 4;

/// The difference between two ways of cutting a batch that is rounding, relative to the largest
/// gradients of the parts: an item at a kink of the loss may fall to either side.
const TOLERANCE_OF_CUTS: f64 = 1e-2;

/// How many numbers of a parameter are compared then, at the most, and of a few items. Their memory
/// is not planned.
const NUMBERS: usize = 4096;
const FEW_NUMBERS: usize = 1 << 16;

/// Whether the gradient of a split batch is known to be that of the whole batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum SplitCheck {
    /// No batch was split.
    #[default]
    NotNeeded,
    /// The gradients of a few items were those of their parts, and those of batches did not depend
    /// on where they were cut.
    Agreed,
    /// It was not, and the user accepts that.
    Accepted,
    /// Items have two different gradients, because the step draws numbers, such as a dropout.
    Random,
    /// Batch normalization makes the gradient of an item depend on the others.
    BatchNorm,
}

/// What a comparison shows, unless the device did not compute it.
type Compared<T> = Result<T, ExecutionError>;

/// Checks a batch that is to be cut like this, by steps on as many items.
///
/// # Errors
///
/// Inside, [`TrainError::Coupled`] if the gradient is not that of the parts.
pub(crate) fn check<M>(
    learner: &Learner<M>,
    batch: &<M as TrainStep>::Input,
    cut: Vec<Range<usize>>,
    reduction: LossReduction,
) -> Compared<Result<SplitCheck, TrainError>>
where
    M: LearnerModel,
    <M as TrainStep>::Input: MicroBatch,
{
    let model = learner.model();
    if has_batch_norm(&model) {
        return Ok(Ok(SplitCheck::BatchNorm));
    }
    let items = cut.last().map_or(0, |last| last.end);
    let largest = cut.iter().map(Range::len).max().unwrap_or(1);
    unchanged(&model, || {
        let mut verdict = Verdict::Nothing;
        for place in 0..PLACES {
            let few = few(items * place / PLACES, items, largest);
            let first = few.start + ITEMS.1.min(few.len() / 2);
            let cuts = [&[few.clone()][..], &[few.start..first, first..few.end]];
            verdict = judged(learner, batch, cuts, reduction, (FEW_NUMBERS, TOLERANCE))?;
            if !matches!(verdict, Verdict::Nothing) {
                break;
            }
        }
        if matches!(verdict, Verdict::Nothing | Verdict::Agreed) {
            let cuts = [&cut[..], &elsewhere(items, largest)];
            verdict = judged(learner, batch, cuts, reduction, (NUMBERS, TOLERANCE_OF_CUTS))?;
        }
        Ok(match verdict {
            Verdict::Differs(parameter, by) => {
                Err(TrainError::Coupled { parameter, percent: 100.0 * by })
            }
            Verdict::Random => Ok(SplitCheck::Random),
            Verdict::Agreed | Verdict::Nothing => Ok(SplitCheck::Agreed),
        })
    })
}

/// The parameter whose gradient differs between a batch of `items` items and its two halves, and by
/// how much.
pub(crate) fn check_whole<M>(
    learner: &Learner<M>,
    batch: &<M as TrainStep>::Input,
    items: usize,
    reduction: LossReduction,
) -> Compared<Option<(String, f64)>>
where
    M: LearnerModel,
    <M as TrainStep>::Input: MicroBatch,
{
    let model = learner.model();
    if has_batch_norm(&model) {
        return Ok(None);
    }
    let (whole, halves) = (0..items, [0..items / 2, items / 2..items]);
    let cuts = [std::slice::from_ref(&whole), &halves];
    let by = (NUMBERS, TOLERANCE_OF_CUTS);
    let verdict = unchanged(&model, || judged(learner, batch, cuts, reduction, by))?;
    Ok(match verdict {
        Verdict::Differs(parameter, by) => Some((parameter, by)),
        Verdict::Nothing | Verdict::Agreed | Verdict::Random => None,
    })
}

/// A few items from `begin` on, no more than `most`, which fit. Two at least: one has no parts.
fn few(begin: usize, items: usize, most: usize) -> Range<usize> {
    let count = ITEMS.0.min(most.max(2)).min(items);
    let begin = begin.min(items - count);
    begin..begin + count
}

/// What two ways of cutting items show.
enum Verdict {
    /// All weigh nothing, or no gradient is more than zero.
    Nothing,
    Agreed,
    /// A parameter, and by how much its gradients differ.
    Differs(String, f64),
    /// One way has two different gradients.
    Random,
}

/// Compares two ways of cutting items, and one of them with itself if they differ.
fn judged<M>(
    learner: &Learner<M>,
    batch: &<M as TrainStep>::Input,
    cuts: [&[Range<usize>]; 2],
    reduction: LossReduction,
    by: (usize, f64),
) -> Compared<Verdict>
where
    M: LearnerModel,
    <M as TrainStep>::Input: MicroBatch,
{
    let (_, tolerance) = by;
    let Some((parameter, apart)) = between(learner, batch, cuts, reduction, by)? else {
        return Ok(Verdict::Nothing);
    };
    if apart <= tolerance {
        return Ok(Verdict::Agreed);
    }
    let again = between(learner, batch, [cuts[0]; 2], reduction, by)?;
    Ok(match again {
        Some((_, apart)) if apart > tolerance => Verdict::Random,
        _ => Verdict::Differs(parameter, apart),
    })
}

/// Another way to cut a batch, into parts that are no larger. The same way if they have one item.
fn elsewhere(items: usize, largest: usize) -> Vec<Range<usize>> {
    let half = largest.div_ceil(2).min(items);
    let rest = (half..items).step_by(largest).map(|begin| begin..items.min(begin + largest));
    std::iter::once(0..half).chain(rest).collect()
}

fn weight_of(batch: &impl MicroBatch, cut: &[Range<usize>]) -> f64 {
    cut.iter().map(|part| batch.range(part.clone()).weight()).sum()
}

/// The parameter whose gradient differs most between two ways of cutting items, and by how much of
/// what the parts have. `None` if that tells nothing: all weigh nothing, or all gradients are zero.
/// At most so many numbers of each parameter are compared. A gradient that is zero but for
/// rounding, such as that of an attention's key bias, is within the tolerance.
fn between<M>(
    learner: &Learner<M>,
    batch: &<M as TrainStep>::Input,
    cuts: [&[Range<usize>]; 2],
    reduction: LossReduction,
    (numbers, tolerance): (usize, f64),
) -> Compared<Option<(String, f64)>>
where
    M: LearnerModel,
    <M as TrainStep>::Input: MicroBatch,
{
    let model = learner.model();
    let weights = cuts.iter().map(|cut| weight_of(batch, cut));
    if reduction == LossReduction::Mean && weights.into_iter().any(|weight| weight == 0.0) {
        return Ok(None);
    }
    let mut sizes = BTreeMap::new();
    let mut of = |cut: &[Range<usize>]| {
        let total = weight_of(batch, cut);
        let mut gradients = WeightedGradients::new(reduction, total);
        for part in cut {
            let part = batch.range(part.clone());
            let weight = part.weight();
            let grads = learner.train_step(part).grads;
            let share = if reduction == LossReduction::Mean { weight / total } else { 1.0 };
            if share > 0.0 {
                for (path, size) in largest_of(&model, &grads)? {
                    *sizes.entry(path).or_insert(0.0) += share * size / 2.0;
                }
            }
            gradients.add(&model, grads, weight);
        }
        read(&model, &gradients.finish(&model), numbers)
    };
    let (one, other) = (of(cuts[0])?, of(cuts[1])?);
    let largest = sizes.values().copied().fold(0.0, f64::max);
    if largest == 0.0 {
        return Ok(None);
    }
    let of = |(one, other): (&Of, &Of)| {
        // Numbers that are none in both say nothing of the cuts.
        let apart = one.1.iter().zip(&other.1).map(|(one, other)| {
            match (one.is_finite(), other.is_finite()) {
                (true, true) => f64::from((one - other).abs()),
                (false, false) => 0.0,
                _ => f64::INFINITY,
            }
        });
        let apart = apart.fold(0.0, f64::max);
        let least = largest * ROUNDING / tolerance;
        let size = sizes.get(&one.0).copied().unwrap_or_default().max(least);
        (one.0.clone(), apart / size)
    };
    let apart = one.iter().zip(&other).map(of).filter(|(_, by)| !by.is_nan());
    Ok(apart.max_by(|one, other| one.1.total_cmp(&other.1)))
}

/// The gradient of a parameter, with its path.
type Of = (String, Vec<f32>);

/// A gradient, in the order of the model.
type Read = Vec<Of>;

/// Reads at most so many numbers of each parameter, evenly spread.
fn read<M: Module>(model: &M, grads: &GradientsParams, most: usize) -> Compared<Read> {
    each_of(model, grads, |grad| {
        let apart = grad.shape().num_elements().div_ceil(most).max(1);
        Ok(grad.try_into_data()?.iter::<f32>().step_by(apart).collect())
    })
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
