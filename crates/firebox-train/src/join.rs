//! Joins the outputs of micro-batches into the output of their batch, for burn's own output types.
//! A Learner uses these functions where the batch's output fits. Passed to
//! [`LearnerBuilder::metrics_see_whole`](crate::LearnerBuilder::metrics_see_whole), one is always
//! used.
//!
//! Rows keep the order of the batch. The loss is the batch's: the sum of the parts' losses, each
//! times its share.

use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn::train::{
    ClassificationOutput, MultiLabelClassificationOutput, RegressionOutput, SequenceOutput,
};

use crate::whole::Joins;

/// Adds all of them, for outputs on one backend.
pub(crate) fn of_burn<B: Backend>(joins: Joins) -> Joins {
    joins
        .of_burn(classification::<B>, |part| vec![part.output.dims()[1]])
        .of_burn(multi_label::<B>, |part| vec![part.output.dims()[1], part.targets.dims()[1]])
        .of_burn(regression::<B>, |part| vec![part.output.dims()[1], part.targets.dims()[1]])
        .of_burn(sequence::<B>, |part| {
            let [_, length, tokens] = part.logits.dims();
            let predicted = part.predictions.as_ref().map_or(length, |of| of.dims()[1]);
            vec![length, tokens, predicted, part.targets.dims()[1]]
        })
}

/// Joins classification outputs.
///
/// # Panics
///
/// If there are none, or the numbers of classes differ.
pub fn classification<B: Backend>(
    parts: Vec<(ClassificationOutput<B>, f64)>,
) -> ClassificationOutput<B> {
    let (loss, outputs, targets) = columns(parts, |part| (part.loss, part.output, part.targets));
    ClassificationOutput::new(loss, floats(outputs), Tensor::cat(targets, 0))
}

/// Joins multi-label classification outputs.
///
/// # Panics
///
/// If there are none, or the numbers of classes differ.
pub fn multi_label<B: Backend>(
    parts: Vec<(MultiLabelClassificationOutput<B>, f64)>,
) -> MultiLabelClassificationOutput<B> {
    let (loss, outputs, targets) = columns(parts, |part| (part.loss, part.output, part.targets));
    MultiLabelClassificationOutput::new(loss, floats(outputs), Tensor::cat(targets, 0))
}

/// Joins regression outputs.
///
/// # Panics
///
/// If there are none, or the numbers of targets differ.
pub fn regression<B: Backend>(parts: Vec<(RegressionOutput<B>, f64)>) -> RegressionOutput<B> {
    let (loss, outputs, targets) = columns(parts, |part| (part.loss, part.output, part.targets));
    RegressionOutput::new(loss, floats(outputs), floats(targets))
}

/// Joins outputs for sequences of one length. Keeps the predictions if all parts have them.
///
/// # Panics
///
/// If there are none, or lengths or numbers of tokens differ.
pub fn sequence<B: Backend>(parts: Vec<(SequenceOutput<B>, f64)>) -> SequenceOutput<B> {
    let mut losses = Vec::new();
    let mut logits = Vec::new();
    let mut targets = Vec::new();
    let mut predictions = Some(Vec::new());
    for (part, share) in parts {
        losses.push((part.loss, share));
        logits.push(part.logits);
        targets.push(part.targets);
        predictions = predictions.zip(part.predictions).map(|(mut all, of)| {
            all.push(of);
            all
        });
    }
    let predictions = predictions.map(|all| Tensor::cat(all, 0));
    SequenceOutput::new(loss(losses), floats(logits), predictions, Tensor::cat(targets, 0))
}

/// The loss of the batch, and the outputs and targets of its parts.
fn columns<B: Backend, T, O, R>(
    parts: Vec<(T, f64)>,
    of: impl Fn(T) -> (Tensor<B, 1>, O, R),
) -> (Tensor<B, 1>, Vec<O>, Vec<R>) {
    let mut losses = Vec::new();
    let mut outputs = Vec::new();
    let mut targets = Vec::new();
    for (part, share) in parts {
        let (loss, output, target) = of(part);
        losses.push((loss, share));
        outputs.push(output);
        targets.push(target);
    }
    (loss(losses), outputs, targets)
}

/// Joins tensors without the graph of the step, whose backward pass is done.
fn floats<B: Backend, const D: usize>(parts: Vec<Tensor<B, D>>) -> Tensor<B, D> {
    Tensor::cat(parts.into_iter().map(Tensor::detach).collect(), 0)
}

fn loss<B: Backend>(losses: Vec<(Tensor<B, 1>, f64)>) -> Tensor<B, 1> {
    let shares = losses.into_iter().map(|(loss, share)| loss.detach() * share);
    shares.reduce(|sum, share| sum + share).expect("a batch has a part")
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;
    use burn::prelude::*;

    use super::*;
    use crate::reduction::LossReduction;
    use crate::whole::{Joining, joined};

    const SHARES: [f64; 2] = [0.25, 0.75];

    fn floats_of<const D: usize>(values: [f32; 2], shape: [usize; D]) -> Tensor<Flex, D> {
        Tensor::<Flex, 1>::from_floats(values, &Default::default()).reshape(shape)
    }

    fn ints_of<const D: usize>(values: [i32; 2], shape: [usize; D]) -> Tensor<Flex, D, Int> {
        Tensor::<Flex, 1, Int>::from_ints(values, &Default::default()).reshape(shape)
    }

    fn losses() -> [Tensor<Flex, 1>; 2] {
        [2.0, 6.0].map(|loss| Tensor::from_floats([loss], &Default::default()))
    }

    #[track_caller]
    fn check<const D: usize>(loss: Tensor<Flex, 1>, output: Tensor<Flex, D>, targets: Vec<i64>) {
        assert_eq!(loss.into_scalar(), 5.0, "each loss by its share");
        let output: Vec<f32> = output.into_data().to_vec().expect("it is f32");
        assert_eq!((output, targets), (vec![1.0, 2.0, 3.0, 4.0], vec![0, 1, 1, 0]));
    }

    #[test]
    fn outputs_stand_in_the_order_of_their_parts() {
        let [first, second] = losses();
        let parts = [(first, [1.0, 2.0], [0, 1]), (second, [3.0, 4.0], [1, 0])];
        let with = |index: usize| (parts[index].0.clone(), parts[index].1, parts[index].2);
        let ints = |data: TensorData| data.iter::<i64>().collect::<Vec<_>>();
        let of = |index: usize| {
            let (loss, output, targets) = with(index);
            ClassificationOutput::new(loss, floats_of(output, [2, 1]), ints_of(targets, [2]))
        };
        let whole = classification(vec![(of(0), SHARES[0]), (of(1), SHARES[1])]);
        check(whole.loss, whole.output, ints(whole.targets.into_data()));
        let of = |index: usize| {
            let (loss, output, targets) = with(index);
            let targets = ints_of(targets, [1, 2]);
            MultiLabelClassificationOutput::new(loss, floats_of(output, [1, 2]), targets)
        };
        let whole = multi_label(vec![(of(0), SHARES[0]), (of(1), SHARES[1])]);
        check(whole.loss, whole.output, ints(whole.targets.into_data()));
        let of = |index: usize| {
            let (loss, output, targets) = with(index);
            let targets = ints_of(targets, [2, 1]).float();
            RegressionOutput::new(loss, floats_of(output, [2, 1]), targets)
        };
        let whole = regression(vec![(of(0), SHARES[0]), (of(1), SHARES[1])]);
        check(whole.loss, whole.output, ints(whole.targets.into_data()));
        let of = |index: usize, predicts: bool| {
            let (loss, output, targets) = with(index);
            let predictions = predicts.then(|| ints_of(targets, [1, 2]));
            let targets = ints_of(targets, [1, 2]);
            SequenceOutput::new(loss, floats_of(output, [1, 2, 1]), predictions, targets)
        };
        let whole = sequence(vec![(of(0, true), SHARES[0]), (of(1, true), SHARES[1])]);
        let predictions = whole.predictions.expect("both have some").into_data();
        assert_eq!(ints(predictions), [0, 1, 1, 0]);
        check(whole.loss, whole.logits, ints(whole.targets.into_data()));
        let whole = sequence(vec![(of(0, true), SHARES[0]), (of(1, false), SHARES[1])]);
        assert!(whole.predictions.is_none(), "one part has none");
    }

    #[test]
    fn outputs_of_several_lengths_stay_as_they_are() {
        type Output = SequenceOutput<Flex>;
        let of = |length: usize| {
            let device = Default::default();
            let [loss, _] = losses();
            let logits = Tensor::<Flex, 3>::zeros([1, length, 2], &device);
            let targets = Tensor::<Flex, 2, Int>::zeros([1, length], &device);
            (SequenceOutput::new(loss, logits, None, targets), 1.0)
        };
        let joins = of_burn::<Flex>(Joins::default());
        assert_eq!(joins.wanted::<Output>(), Joining::OfBurn);
        assert!(joins.of::<Output>(Joining::Asked).is_none(), "nobody has asked");
        assert!(joins.of::<Output>(Joining::NoRoom).is_none());
        let join = joins.of::<Output>(Joining::OfBurn).expect("it is burn's");
        let shown = |parts| {
            let shown = joined(join, LossReduction::Mean, parts).into_iter();
            shown.map(|output| output.logits.dims()).collect::<Vec<_>>()
        };
        assert_eq!(shown(vec![of(3), of(3)]), [[2, 3, 2]]);
        assert_eq!(shown(vec![of(3), of(4)]), [[1, 3, 2], [1, 4, 2]]);
        assert_eq!(shown(vec![of(3)]), [[1, 3, 2]]);
        let asked = Joins::default().with(sequence::<Flex>);
        let both = of_burn::<Flex>(asked);
        assert_eq!(both.wanted::<Output>(), Joining::Asked, "the user's stays");
        assert!(both.of::<Output>(Joining::Asked).is_some());
    }
}
