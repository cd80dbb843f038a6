//! Joins the outputs of micro-batches, so that metrics see one output for each batch.

use std::any::Any;

use burn::tensor::Tensor;
use burn::train::{ClassificationOutput, RegressionOutput};

use crate::gradients::LossReduction;

/// The outputs of a batch for the metrics, each with the weight of its micro-batch: one, if it is
/// of a type of burn's that can be joined, otherwise as they are.
pub(crate) fn joined<T: 'static>(parts: Vec<(T, f64)>, reduction: LossReduction) -> Vec<T> {
    if parts.len() < 2 {
        return parts.into_iter().map(|(output, _)| output).collect();
    }
    let parts = match of_type::<T, ClassificationOutput>(parts, |parts| {
        let (mut losses, mut outputs, mut targets) = (Vec::new(), Vec::new(), Vec::new());
        for (part, weight) in parts {
            losses.push((part.loss, weight));
            outputs.push(part.output);
            targets.push(part.targets);
        }
        let (output, targets) = (Tensor::cat(outputs, 0), Tensor::cat(targets, 0));
        ClassificationOutput { loss: loss_of(losses, reduction), output, targets }
    }) {
        Ok(output) => return vec![output],
        Err(parts) => parts,
    };
    let joined = of_type::<T, RegressionOutput>(parts, |parts| {
        let (mut losses, mut outputs, mut targets) = (Vec::new(), Vec::new(), Vec::new());
        for (part, weight) in parts {
            losses.push((part.loss, weight));
            outputs.push(part.output);
            targets.push(part.targets);
        }
        let (output, targets) = (Tensor::cat(outputs, 0), Tensor::cat(targets, 0));
        RegressionOutput { loss: loss_of(losses, reduction), output, targets }
    });
    match joined {
        Ok(output) => vec![output],
        Err(parts) => parts.into_iter().map(|(output, _)| output).collect(),
    }
}

/// Joins outputs if they are of type `O`.
fn of_type<T: 'static, O: 'static>(
    parts: Vec<(T, f64)>,
    join: impl FnOnce(Vec<(O, f64)>) -> O,
) -> Result<T, Vec<(T, f64)>> {
    let mut parts = Some(parts);
    let Some(own) = (&mut parts as &mut dyn Any).downcast_mut::<Option<Vec<(O, f64)>>>() else {
        return Err(parts.expect("nobody has taken them"));
    };
    let mut joined = Some(join(own.take().expect("nobody has taken them")));
    let joined = (&mut joined as &mut dyn Any).downcast_mut::<Option<T>>();
    Ok(joined.and_then(Option::take).expect("both types are one"))
}

/// The loss of a batch, from those of its parts.
fn loss_of(parts: Vec<(Tensor<1>, f64)>, reduction: LossReduction) -> Tensor<1> {
    let total: f64 = parts.iter().map(|(_, weight)| weight).sum();
    let scale = |weight: f64| match reduction {
        LossReduction::Mean => weight / total,
        LossReduction::Sum => 1.0,
    };
    let parts = parts.into_iter().map(|(loss, weight)| loss * scale(weight));
    parts.reduce(|one, other| one + other).expect("there are two parts or more")
}
