//! Batches of random items, the weights they report, and losses of burn and of users on outputs for
//! them.

use burn::nn::loss::{
    BinaryCrossEntropyLossConfig, CosineEmbeddingLossConfig, CrossEntropyLossConfig,
    HuberLossConfig, KLDivLossConfig, LpLossConfig, MseLoss, PoissonNllLossConfig, Reduction,
    SmoothL1LossConfig,
};
use burn::prelude::*;
use burn::tensor::activation::{log_softmax, softmax};
use firebox::{MicroBatch, weight};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::model::WIDTH;

/// Numbers per output.
pub const CLASSES: usize = 4;
/// Number of tokens.
pub const VOCABULARY: usize = 7;
/// Class of positions after the end of an item.
const PADDING: i64 = 0;
const CLASS_WEIGHTS: [f32; CLASSES] = [0.5, 1.0, 3.0, 0.2];

/// How a batch computes its weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weight {
    Items,
    /// The number of tokens that are not padding.
    Tokens,
    /// The class weights of all targets, or of the first one of each item.
    Classes,
}

/// Items of one length, padded at their ends.
#[derive(Clone, Debug, MicroBatch)]
#[micro_batch(weight = Batch::weight)]
pub struct Batch<B: Backend> {
    /// `[items, length, WIDTH]`.
    pub vectors: Tensor<B, 3>,
    /// `[items, length]`.
    pub tokens: Tensor<B, 2, Int>,
    /// `[items, length]`, classes.
    pub targets: Tensor<B, 2, Int>,
    /// `[items, length, CLASSES]`, between 0 and 1.
    pub values: Tensor<B, 3>,
    /// `[items]`, the first class of each item.
    pub labels: Tensor<B, 1, Int>,
    #[micro_batch(shared)]
    pub said: (Weight, bool),
}

/// Size of a batch.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    pub items: usize,
    pub length: usize,
    /// Whether items are padded. Some are then only padding.
    pub padded: bool,
}

impl<B: Backend> Batch<B> {
    pub fn new(size: Size, seed: u64, said: (Weight, bool), device: &B::Device) -> Self {
        let Size { items, length, padded } = size;
        let mut rng = StdRng::seed_from_u64(seed);
        let mut floats =
            |count: usize| -> Vec<f64> { (0..count).map(|_| rng.random_range(0.0..1.0)).collect() };
        let vectors = floats(items * length * WIDTH).into_iter().map(|x| 2.0 * x - 1.0).collect();
        let values = floats(items * length * CLASSES);
        let tokens = (0..items * length).map(|_| rng.random_range(0..VOCABULARY as i32)).collect();
        let mut targets = Vec::new();
        for _ in 0..items {
            let real = if padded { rng.random_range(0..=length) } else { length };
            let target = |at| match at < real {
                true => rng.random_range(1..CLASSES as i32),
                false => PADDING as i32,
            };
            targets.extend((0..length).map(target));
        }
        let f64s = |values: Vec<f64>, width| {
            Tensor::from_data(TensorData::new(values, [items, length, width]), device)
        };
        let ints =
            |values: Vec<i32>| Tensor::from_data(TensorData::new(values, [items, length]), device);
        let targets = ints(targets);
        Self {
            vectors: f64s(vectors, WIDTH),
            tokens: ints(tokens),
            labels: targets.clone().narrow(1, 0, 1).reshape([items]),
            targets,
            values: f64s(values, CLASSES),
            said,
        }
    }

    /// The same batch that says another weight.
    pub fn saying(&self, weight: Weight) -> Self {
        Self { said: (weight, self.said.1), ..self.clone() }
    }

    fn weight(&self) -> f64 {
        let [items, length] = self.targets.dims();
        let (weight, each_token) = self.said;
        let targets = match each_token {
            true => self.targets.clone().reshape([items * length]),
            false => self.labels.clone(),
        };
        match weight {
            Weight::Items => items as f64,
            Weight::Tokens => weight::real_tokens(&targets, &[PADDING]),
            Weight::Classes => weight::of_classes(&targets, &CLASS_WEIGHTS),
        }
    }
}

/// How burn's losses reduce to one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    Mean,
    Sum,
    BatchMean,
}

impl Loss {
    /// What it divides by, if the batch counts that.
    pub fn divides_by(self) -> Option<Weight> {
        match self {
            Self::CrossEntropy { weights: true, .. } => Some(Weight::Classes),
            Self::RealTokens => Some(Weight::Tokens),
            _ => None,
        }
    }
}

/// A loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    CrossEntropy {
        padding: bool,
        weights: bool,
        smoothing: bool,
    },
    Mse(By),
    Huber(By),
    SmoothL1(By),
    Lp(By),
    Poisson(By),
    KlDiv(By),
    Bce {
        weights: bool,
        smoothing: bool,
    },
    Cosine(By),
    /// The mean over tokens that are not padding.
    RealTokens,
    /// The mean over items of each item's mean over tokens that are not padding.
    ItemByItem,
    /// The root of a mean.
    Root,
    /// The largest.
    Largest,
    /// The hardest half.
    Hardest,
    /// How similar the outputs of a batch are.
    Contrast,
    /// The variance over the batch.
    Spread,
    /// A sum plus the size of a weight.
    Penalized,
    /// One minus twice the overlap divided by the total.
    Dice,
    /// The square of a mean.
    Squared,
    /// A mean of values relative to the batch's mean.
    Centered,
}

/// A loss on the outputs of each token, or on their mean over an item.
#[derive(Clone, Copy, Debug)]
pub struct Judge {
    pub loss: Loss,
    pub each_token: bool,
}

impl Judge {
    /// Loss of `output`, `[items, length, CLASSES]`.
    pub fn loss<B: Backend>(
        &self,
        output: Tensor<B, 3>,
        batch: &Batch<B>,
        parameter: Tensor<B, 2>,
    ) -> Tensor<B, 1> {
        let device = &output.device();
        let [items, length, _] = output.dims();
        let (rows, values, targets) = if self.each_token {
            let rows = items * length;
            let values = batch.values.clone().reshape([rows, CLASSES]);
            let targets = batch.targets.clone().reshape([rows]);
            (output.reshape([rows, CLASSES]), values, targets)
        } else {
            let rows = output.mean_dim(1).reshape([items, CLASSES]);
            let values = batch.values.clone().narrow(1, 0, 1).reshape([items, CLASSES]);
            (rows, values, batch.labels.clone())
        };
        let count = rows.dims()[0];
        let each = || {
            let chosen = targets.clone().reshape([count, 1]);
            log_softmax(rows.clone(), 1).gather(1, chosen).neg().reshape([count])
        };
        let real = || targets.clone().not_equal_elem(PADDING).float();
        match self.loss {
            Loss::CrossEntropy { padding, weights, smoothing } => CrossEntropyLossConfig::new()
                .with_pad_tokens(padding.then(|| vec![PADDING as usize]))
                .with_weights(weights.then(|| CLASS_WEIGHTS.to_vec()))
                .with_smoothing(smoothing.then_some(0.1))
                .init(device)
                .forward(rows, targets),
            Loss::Mse(by) => MseLoss::new().forward(rows, values, without_batch_mean(by)),
            Loss::Huber(by) => {
                HuberLossConfig::new(0.7).init().forward(rows, values, without_batch_mean(by))
            }
            Loss::SmoothL1(by) => SmoothL1LossConfig::new().init().forward_with_reduction(
                rows,
                values,
                without_batch_mean(by),
            ),
            Loss::Lp(by) => {
                LpLossConfig::new(3.0).init().forward(rows, values, without_batch_mean(by))
            }
            Loss::Poisson(by) => {
                PoissonNllLossConfig::new().init().forward(rows, values, without_batch_mean(by))
            }
            Loss::KlDiv(by) => {
                let by = match by {
                    By::BatchMean => Reduction::BatchMean,
                    by => without_batch_mean(by),
                };
                let rows = log_softmax(rows, 1);
                KLDivLossConfig::new().init().forward(rows, softmax(values, 1), by)
            }
            Loss::Bce { weights, smoothing } => BinaryCrossEntropyLossConfig::new()
                .with_weights(weights.then(|| CLASS_WEIGHTS.to_vec()))
                .with_smoothing(smoothing.then_some(0.1))
                .with_logits(true)
                .init(device)
                .forward(rows, values.greater_elem(0.5).int()),
            Loss::Cosine(by) => {
                let target = targets.greater_elem(1).int().mul_scalar(2).sub_scalar(1);
                let config = CosineEmbeddingLossConfig::new().with_margin(0.1);
                let config = config.with_reduction(without_batch_mean(by));
                config.init().forward(rows, values, target)
            }
            Loss::RealTokens => (each() * real()).sum() / real().sum(),
            Loss::ItemByItem => {
                let shape = [items, count / items];
                let real = real().reshape(shape);
                let sums = (each().reshape(shape) * real.clone()).sum_dim(1);
                (sums / real.sum_dim(1).clamp_min(1.0)).mean()
            }
            Loss::Root => each().mean().sqrt(),
            Loss::Largest => each().max(),
            Loss::Hardest => each().sort_descending(0).narrow(0, 0, count.div_ceil(2)).mean(),
            Loss::Contrast => rows.clone().matmul(rows.transpose()).mean(),
            Loss::Spread => rows.clone().var(0).mean() + each().mean(),
            Loss::Penalized => each().sum() + parameter.powf_scalar(2.0).sum(),
            Loss::Dice => {
                let likely = softmax(rows, 1);
                let overlap = (likely.clone() * values.clone()).sum();
                (overlap / (likely + values).sum()).mul_scalar(-2.0).add_scalar(1.0)
            }
            Loss::Squared => each().mean().powf_scalar(2.0),
            Loss::Centered => {
                let centered = rows.clone() - rows.mean_dim(0);
                centered.powf_scalar(2.0).mean()
            }
        }
    }
}

/// The reduction for losses without a mean over the batch, which are most of burn's.
fn without_batch_mean(by: By) -> Reduction {
    match by {
        By::Mean => Reduction::Mean,
        By::Sum => Reduction::Sum,
        By::BatchMean => Reduction::Auto,
    }
}
