//! Joins the outputs of micro-batches, so that metrics see one output for each batch.

use std::any::Any;

use burn::tensor::Tensor;
use burn::train::{
    ClassificationOutput, MultiLabelClassificationOutput, RegressionOutput, SequenceOutput,
};

use crate::gradients::LossReduction;

/// The outputs of a batch for the metrics, each with the weight of its micro-batch: one, if it is
/// of a type of burn's that can be joined, otherwise as they are.
pub(crate) fn joined<T: 'static>(mut parts: Vec<(T, f64)>, reduction: LossReduction) -> Vec<T> {
    // The mean over nothing is not a number.
    if reduction == LossReduction::Mean && parts.iter().any(|(_, weight)| *weight > 0.0) {
        parts.retain(|(_, weight)| *weight > 0.0);
    }
    if parts.len() < 2 || parts.iter().all(|(_, weight)| *weight == 0.0) {
        return parts.into_iter().map(|(output, _)| output).collect();
    }
    /// Joins the parts if they are outputs of this type.
    macro_rules! of_burn {
        ($output:ident, $parts:expr) => {
            of_type::<T, $output>($parts, |parts| {
                let outputs = parts.iter().map(|(part, _)| part.output.dims());
                if !are_alike(outputs)
                    || !are_alike(parts.iter().map(|(part, _)| part.targets.dims()))
                {
                    return Err(parts);
                }
                let (mut losses, mut outputs, mut targets) = (Vec::new(), Vec::new(), Vec::new());
                for (part, weight) in parts {
                    losses.push((part.loss, weight));
                    outputs.push(part.output);
                    targets.push(part.targets);
                }
                let (output, targets) = (Tensor::cat(outputs, 0), Tensor::cat(targets, 0));
                Ok($output { loss: loss_of(losses, reduction), output, targets })
            })
        };
    }
    let joined = of_burn!(ClassificationOutput, parts)
        .or_else(|parts| of_burn!(MultiLabelClassificationOutput, parts))
        .or_else(|parts| of_burn!(RegressionOutput, parts))
        .or_else(|parts| of_type::<T, _>(parts, |parts| sequences(parts, reduction)));
    match joined {
        Ok(output) => vec![output],
        Err(parts) => parts.into_iter().map(|(output, _)| output).collect(),
    }
}

/// Whether tensors of these dimensions can be put together by their items.
fn are_alike<const D: usize>(mut dims: impl Iterator<Item = [usize; D]>) -> bool {
    let first = dims.next();
    first.is_none_or(|first| dims.all(|dims| dims[1..] == first[1..]))
}

/// Joins the outputs for sequences, if all have one length.
fn sequences(
    parts: Vec<(SequenceOutput, f64)>,
    reduction: LossReduction,
) -> Result<SequenceOutput, Vec<(SequenceOutput, f64)>> {
    let predicted = parts.iter().filter_map(|(part, _)| part.predictions.as_ref());
    if !are_alike(parts.iter().map(|(part, _)| part.logits.dims()))
        || !are_alike(parts.iter().map(|(part, _)| part.targets.dims()))
        || !are_alike(predicted.map(|predicted| predicted.dims()))
    {
        return Err(parts);
    }
    let (mut losses, mut logits, mut targets) = (Vec::new(), Vec::new(), Vec::new());
    let mut predictions = Some(Vec::new());
    for (part, weight) in parts {
        losses.push((part.loss, weight));
        logits.push(part.logits);
        targets.push(part.targets);
        match (&mut predictions, part.predictions) {
            (Some(all), Some(part)) => all.push(part),
            _ => predictions = None,
        }
    }
    Ok(SequenceOutput {
        loss: loss_of(losses, reduction),
        logits: Tensor::cat(logits, 0),
        predictions: predictions.map(|all| Tensor::cat(all, 0)),
        targets: Tensor::cat(targets, 0),
    })
}

/// Joins outputs if they are of type `O`, and go together.
fn of_type<T: 'static, O: 'static>(
    parts: Vec<(T, f64)>,
    join: impl FnOnce(Vec<(O, f64)>) -> Result<O, Vec<(O, f64)>>,
) -> Result<T, Vec<(T, f64)>> {
    let mut parts = Some(parts);
    let Some(own) = (&mut parts as &mut dyn Any).downcast_mut::<Option<Vec<(O, f64)>>>() else {
        return Err(parts.expect("nobody has taken them"));
    };
    let mut joined = match join(own.take().expect("nobody has taken them")) {
        Ok(joined) => Some(joined),
        Err(apart) => {
            *own = Some(apart);
            return Err(parts.expect("they were put back"));
        }
    };
    let joined = (&mut joined as &mut dyn Any).downcast_mut::<Option<T>>();
    Ok(joined.and_then(Option::take).expect("both types are one"))
}

/// The loss of a batch, from those of its parts, none of which weighs nothing in a mean.
fn loss_of(parts: Vec<(Tensor<1>, f64)>, reduction: LossReduction) -> Tensor<1> {
    // The losses of items.
    if parts.iter().any(|(loss, _)| loss.shape().num_elements() > 1) {
        return Tensor::cat(parts.into_iter().map(|(loss, _)| loss).collect(), 0);
    }
    let total: f64 = parts.iter().map(|(_, weight)| weight).sum();
    let scale = |weight: f64| match reduction {
        LossReduction::Mean => weight / total,
        LossReduction::Sum => 1.0,
    };
    let parts = parts.into_iter().map(|(loss, weight)| loss * scale(weight));
    parts.reduce(|one, other| one + other).expect("there are two parts or more")
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    fn output(loss: f32, items: usize) -> ClassificationOutput {
        let device = Device::flex();
        let output = Tensor::ones([items, 3], &device);
        let targets = Tensor::zeros([items], &device);
        ClassificationOutput { loss: Tensor::from_floats([loss], &device), output, targets }
    }

    fn loss(output: &ClassificationOutput) -> f32 {
        output.loss.clone().into_scalar()
    }

    #[test]
    fn outputs_are_joined_by_weight() {
        let parts = || vec![(output(1.0, 2), 2.0), (output(4.0, 1), 1.0)];
        let [mean] = &joined(parts(), LossReduction::Mean)[..] else { panic!("one output") };
        assert_eq!((loss(mean), mean.output.dims(), mean.targets.dims()), (2.0, [3, 3], [3]));
        let [sum] = &joined(parts(), LossReduction::Sum)[..] else { panic!("one output") };
        assert_eq!(loss(sum), 5.0);
    }

    #[test]
    fn a_part_that_weighs_nothing_has_no_loss() {
        let parts = vec![(output(f32::NAN, 2), 0.0), (output(1.5, 2), 3.0), (output(0.5, 1), 1.0)];
        let [mean] = &joined(parts, LossReduction::Mean)[..] else { panic!("one output") };
        assert_eq!((loss(mean), mean.targets.dims()), (1.25, [3]));
    }

    #[test]
    fn sequences_are_joined_too() {
        let part = |loss: f32, items: usize, predicts: bool| SequenceOutput {
            loss: Tensor::from_floats([loss], &Device::flex()),
            logits: Tensor::ones([items, 5, 3], &Device::flex()),
            predictions: predicts.then(|| Tensor::zeros([items, 5], &Device::flex())),
            targets: Tensor::zeros([items, 5], &Device::flex()),
        };
        for predicts in [true, false] {
            let parts = vec![(part(1.0, 2, predicts), 2.0), (part(4.0, 1, true), 1.0)];
            let [whole] = &joined(parts, LossReduction::Mean)[..] else { panic!("one output") };
            assert_eq!(whole.loss.clone().into_scalar::<f32>(), 2.0);
            assert_eq!((whole.logits.dims(), whole.targets.dims()), ([3, 5, 3], [3, 5]));
            let predictions = whole.predictions.as_ref().map(Tensor::dims);
            assert_eq!(predictions, predicts.then_some([3, 5]));
        }
    }

    #[test]
    fn outputs_of_different_lengths_stay_apart() {
        let part = |length: usize| SequenceOutput {
            loss: Tensor::from_floats([1.0], &Device::flex()),
            logits: Tensor::ones([2, length, 3], &Device::flex()),
            predictions: None,
            targets: Tensor::zeros([2, length], &Device::flex()),
        };
        let parts = joined(vec![(part(5), 2.0), (part(4), 2.0)], LossReduction::Mean);
        assert_eq!([parts[0].logits.dims(), parts[1].logits.dims()], [[2, 5, 3], [2, 4, 3]]);
    }

    #[test]
    fn other_types_stay_apart() {
        assert_eq!(joined(vec![(7, 1.0), (8, 1.0)], LossReduction::Mean), [7, 8]);
    }
}
