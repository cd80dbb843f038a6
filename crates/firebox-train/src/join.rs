//! The output of a whole batch of those of its micro-batches, for burn's own outputs: what
//! [`LearnerBuilder::metrics_see_whole`](crate::LearnerBuilder::metrics_see_whole) asks for.
//!
//! Rows stand in the order of the batch. The loss is that of the batch: the sum over the parts, each times its share.

use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn::train::{
    ClassificationOutput, MultiLabelClassificationOutput, RegressionOutput, SequenceOutput,
};

/// Joins outputs of a classification.
///
/// # Panics
///
/// If there is none, or the numbers of classes differ.
pub fn classification<B: Backend>(
    parts: Vec<(ClassificationOutput<B>, f64)>,
) -> ClassificationOutput<B> {
    let (losses, rows): (Vec<_>, Vec<_>) = parts
        .into_iter()
        .map(|(part, share)| ((part.loss, share), (part.output, part.targets)))
        .unzip();
    let (outputs, targets): (Vec<_>, Vec<_>) = rows.into_iter().unzip();
    ClassificationOutput::new(loss(losses), floats(outputs), Tensor::cat(targets, 0))
}

/// Joins outputs of a classification with several labels.
///
/// # Panics
///
/// If there is none, or the numbers of classes differ.
pub fn multi_label<B: Backend>(
    parts: Vec<(MultiLabelClassificationOutput<B>, f64)>,
) -> MultiLabelClassificationOutput<B> {
    let (losses, rows): (Vec<_>, Vec<_>) = parts
        .into_iter()
        .map(|(part, share)| ((part.loss, share), (part.output, part.targets)))
        .unzip();
    let (outputs, targets): (Vec<_>, Vec<_>) = rows.into_iter().unzip();
    MultiLabelClassificationOutput::new(loss(losses), floats(outputs), Tensor::cat(targets, 0))
}

/// Joins outputs of a regression.
///
/// # Panics
///
/// If there is none, or the numbers of targets differ.
pub fn regression<B: Backend>(parts: Vec<(RegressionOutput<B>, f64)>) -> RegressionOutput<B> {
    let (losses, rows): (Vec<_>, Vec<_>) = parts
        .into_iter()
        .map(|(part, share)| ((part.loss, share), (part.output, part.targets)))
        .unzip();
    let (outputs, targets): (Vec<_>, Vec<_>) = rows.into_iter().unzip();
    RegressionOutput::new(loss(losses), floats(outputs), floats(targets))
}

/// Joins outputs of a prediction of sequences of one length. Predictions are kept where all parts have them.
///
/// # Panics
///
/// If there is none, or lengths or numbers of tokens differ.
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

/// Without the graph of the step, which has been run backward.
fn floats<B: Backend, const D: usize>(parts: Vec<Tensor<B, D>>) -> Tensor<B, D> {
    Tensor::cat(parts.into_iter().map(Tensor::detach).collect(), 0)
}

fn loss<B: Backend>(losses: Vec<(Tensor<B, 1>, f64)>) -> Tensor<B, 1> {
    let shares = losses.into_iter().map(|(loss, share)| loss.detach() * share);
    shares.reduce(|sum, share| sum + share).expect("a batch has a part")
}
