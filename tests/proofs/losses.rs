//! A small model, its batches, and losses: of burn-nn, and as users write them.

use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::*;
use burn::nn::{
    BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, GroupNorm, GroupNormConfig, LayerNorm,
    LayerNormConfig, Linear, LinearConfig,
};
use burn::optim::GradientsParams;
use burn::prelude::*;
use burn::tensor::activation::{gelu, log_softmax, sigmoid, softmax};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Distribution, IndexingUpdateOp, TensorData, s};
use burn::train::{TrainOutput, TrainStep};
use firebox::MicroBatch;

const WORDS: usize = 11;
pub const WIDE: usize = 8;
const CLASSES: usize = 5;
pub const LONG: usize = 6;

#[derive(Clone, Debug, MicroBatch)]
pub struct Batch<B: Backend> {
    pub x: Tensor<B, 2>,
    images: Tensor<B, 4>,
    ids: Tensor<B, 2, Int>,
    /// Zero behind the end of an item.
    pub tokens: Tensor<B, 2, Int>,
    classes: Tensor<B, 1, Int>,
    many: Tensor<B, 2, Int>,
    pub y: Tensor<B, 2>,
    gate: Tensor<B, 1, Int>,
}

impl<B: Backend> Batch<B> {
    pub fn new(items: usize, device: &B::Device) -> Self {
        let floats = |count: usize, seed: usize| {
            let number =
                |at: usize| ((at * 7919 + seed * 104_729) % 20_011) as f64 / 10_005.5 - 1.0;
            (0..count).map(number).collect::<Vec<f64>>()
        };
        let ints = |count: usize, seed: usize, below: usize| {
            let number = |at: usize| ((at * 7907 + seed * 31) / 3 % 1009 % below) as i64;
            (0..count).map(number).collect::<Vec<i64>>()
        };
        let float = |numbers: Vec<f64>, shape: &[usize]| TensorData::new(numbers, shape.to_vec());
        let int = |numbers: Vec<i64>, shape: &[usize]| TensorData::new(numbers, shape.to_vec());
        let lengths = ints(items, 5, LONG);
        let tokens = ints(items * LONG, 4, WORDS - 1).into_iter().enumerate();
        let tokens = tokens
            .map(|(at, token)| if (at % LONG) as i64 > lengths[at / LONG] { 0 } else { token + 1 });
        let wide = burn::tensor::DType::F64;
        Self {
            x: Tensor::from_data(float(floats(items * 6, 1), &[items, 6]), (device, wide)),
            images: Tensor::from_data(
                float(floats(items * 50, 2), &[items, 2, 5, 5]),
                (device, wide),
            ),
            ids: Tensor::from_data(int(ints(items * LONG, 3, WORDS), &[items, LONG]), device),
            tokens: Tensor::from_data(int(tokens.collect(), &[items, LONG]), device),
            classes: Tensor::from_data(int(ints(items, 6, CLASSES), &[items]), device),
            many: Tensor::from_data(int(ints(items * CLASSES, 7, 2), &[items, CLASSES]), device),
            y: Tensor::from_data(
                float(floats(items * CLASSES, 8), &[items, CLASSES]),
                (device, wide),
            ),
            gate: Tensor::from_data(int(ints(items, 9, 2), &[items]), device),
        }
    }

    fn items(&self) -> usize {
        self.x.dims()[0]
    }
}

#[derive(Module, Debug)]
pub struct Net<B: Backend> {
    pub embedding: Embedding<B>,
    attention: MultiHeadAttention<B>,
    conv: Conv2d<B>,
    batch_norm: BatchNorm<B>,
    group_norm: GroupNorm<B>,
    layer_norm: LayerNorm<B>,
    pub first: Linear<B>,
    of_images: Linear<B>,
    pub second: Linear<B>,
    pub out: Linear<B>,
}

impl<B: Backend> Net<B> {
    pub fn new(device: &B::Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).init::<B>(device);
        let attention = MultiHeadAttentionConfig::new(WIDE, 2).with_dropout(0.0);
        Self {
            embedding: EmbeddingConfig::new(WORDS, WIDE).init(device),
            attention: attention.init(device),
            conv: Conv2dConfig::new([2, 3], [3, 3]).init(device),
            batch_norm: BatchNormConfig::new(WIDE).init(device),
            group_norm: GroupNormConfig::new(2, WIDE).init(device),
            layer_norm: LayerNormConfig::new(WIDE).init(device),
            first: linear(6, WIDE),
            of_images: linear(27, CLASSES),
            second: linear(WIDE, WIDE),
            out: linear(WIDE, CLASSES),
        }
    }

    fn hidden(&self, batch: &Batch<B>) -> Tensor<B, 2> {
        gelu(self.first.forward(batch.x.clone()))
    }

    fn logits(&self, batch: &Batch<B>) -> Tensor<B, 2> {
        self.out.forward(self.hidden(batch))
    }

    fn of_tokens(&self, batch: &Batch<B>) -> Tensor<B, 3> {
        let words = self.embedding.forward(batch.ids.clone());
        let seen = self.attention.forward(MhaInput::self_attn(words.clone())).context;
        self.layer_norm.forward(words + seen)
    }

    fn words(&self, batch: &Batch<B>) -> Tensor<B, 2> {
        let hidden: Tensor<B, 2> = self.of_tokens(batch).flatten(0, 1);
        hidden.matmul(self.embedding.weight.val().transpose())
    }
}

/// The model with a loss.
#[derive(Module, Debug)]
pub struct Case<B: Backend> {
    pub net: Net<B>,
    #[module(skip)]
    pub loss: &'static str,
}

impl<B: AutodiffBackend> TrainStep for Case<B> {
    type Input = Batch<B>;
    type Output = ();

    fn step(&self, batch: Batch<B>) -> TrainOutput<()> {
        let grads = loss(self.loss, &self.net, &batch).backward();
        TrainOutput { grads: GradientsParams::from_grads(grads, self), item: () }
    }
}

/// Losses, and what is said of them.
pub const LOSSES: &[(&str, &str)] = &[
    // Of burn-nn.
    ("cross-entropy", "mean"),
    ("cross-entropy, smoothed", "mean"),
    ("cross-entropy, weighted", "given"),
    ("cross-entropy of tokens", "mean"),
    ("cross-entropy of probabilities", "mean"),
    ("binary cross-entropy", "mean"),
    ("binary cross-entropy, smoothed", "mean"),
    ("binary cross-entropy, weighted", "mean"),
    ("squares", "mean"),
    ("squares, summed", "sum"),
    ("huber", "mean"),
    ("huber, summed", "sum"),
    ("divergence", "mean"),
    ("divergence by batch", "given"),
    ("divergence, summed", "sum"),
    ("smooth l1", "mean"),
    ("cosine", "mean"),
    ("poisson", "undecided"),
    ("lp", "mean"),
    ("ctc", "undecided"),
    // Layers.
    ("convolution", "mean"),
    ("attention", "mean"),
    ("group and layer norm", "mean"),
    ("batch norm", "mixed"),
    ("centered by hand", "mixed"),
    // Sums over what the batch counts.
    ("real tokens", "given"),
    ("real tokens of each item", "mean"),
    ("masked, at least one", "given"),
    ("divided by n", "given"),
    ("divided by the root of n", "given"),
    ("divided by a constant", "sum"),
    ("focal", "given"),
    ("two tasks", "given"),
    ("two tasks and a mean", "given"),
    ("normalized advantages", "given"),
    ("softmax over inputs", "given"),
    ("weighted by position", "given"),
    ("penalty beside a mean", "mean"),
    ("penalty beside a sum", "sum and once"),
    ("penalty beside real tokens", "given, and once"),
    ("means of means", "mean"),
    ("times a constant", "mean"),
    ("noise", "mean"),
    ("time first", "mean"),
    ("two views", "mean"),
    ("repeated items", "mean"),
    ("pairs of its own words", "mean"),
    ("clipped each", "mean"),
    ("uncertainty", "mean"),
    ("gram", "given, as a sum"),
    ("one item counts more", "given"),
    ("numbers that do not cancel", "given"),
    ("rows that do not cancel", "given"),
    ("a sum that is a factor, too", "given, as a sum"),
    ("a mean that is a factor, too", "given, as a mean"),
    ("its own denominator beside it", "given, as a sum"),
    ("a count that is a summand, too", "undecided"),
    ("a count that n divides, squared", "undecided"),
    ("sevenths of a count", "given, and once"),
    ("words that occur", "given, and once"),
    ("steps that follow from n", "given, and once"),
    ("a penalty that n divides", "undecided"),
    ("halves of views", "given, as a sum"),
    ("in the middle of a product", "mean"),
    ("several numbers in another order", "given"),
    ("a detached output by a count", "given"),
    ("rows above and below", "given, as a sum"),
    ("a penalty that a count scales", "given, as a sum"),
    ("a shift beside a penalty", "given, and once"),
    // Items that meet.
    ("contrast", "mixed"),
    ("root of a mean", "mixed"),
    ("mean over the harder half", "mixed"),
    ("hardest", "mixed"),
    ("three hardest", "mixed"),
    ("dice", "mixed"),
    ("spread", "mixed"),
    ("running sum", "mixed"),
    ("first item as anchor", "mixed"),
    ("the next item", "mixed"),
    ("turned around", "mixed"),
    ("sorted against targets", "mixed"),
    ("picked by others", "mixed"),
    ("scaled by what is sorted", "mixed"),
    ("scaled by what is picked", "mixed"),
    ("largest of all", "mixed"),
    ("paired in another order", "mixed"),
    ("mixed up reshape", "mixed"),
    ("balanced experts", "mixed"),
    ("squared gram", "mixed"),
    ("softmax over items", "mixed"),
    ("scaled by its own value", "mixed"),
];

/// Losses that divide by one sum over what the batch counts, which batches weigh.
pub const COUNTED: &[&str] = &[
    "cross-entropy, weighted",
    "real tokens",
    "masked, at least one",
    "focal",
    "penalty beside real tokens",
    "a detached output by a count",
];

fn loss<B: Backend>(name: &str, net: &Net<B>, batch: &Batch<B>) -> Tensor<B, 1> {
    let (device, n) = (batch.x.device(), batch.items());
    let (logits, hidden) = (|| net.logits(batch), || net.hidden(batch));
    let squares = || (logits() - batch.y.clone()).square();
    let each = || squares().mean_dim(1).squeeze_dim::<1>(1);
    let mask = || batch.many.clone().float();
    let weights = || Some(vec![0.2, 1.0, 3.5, 0.7, 2.0]);
    let cross_entropy =
        |logits| CrossEntropyLossConfig::new().init(&device).forward(logits, batch.classes.clone());
    let penalty = || net.first.weight.val().square().sum() * 0.3;
    let likelihood = || {
        let classes = batch.classes.clone().unsqueeze_dim::<2>(1);
        log_softmax(logits(), 1).gather(1, classes).squeeze_dim::<1>(1)
    };
    let of_words = || {
        let tokens: Tensor<B, 2, Int> = batch.tokens.clone().reshape([n * LONG, 1]);
        log_softmax(net.words(batch), 1).gather(1, tokens)
    };
    let real = || batch.tokens.clone().greater_elem(0).float();
    let real_tokens = || {
        let mask = real().reshape([n * LONG, 1]);
        (of_words() * mask.clone()).sum().neg() / mask.sum()
    };
    match name {
        "cross-entropy" => cross_entropy(logits()),
        "cross-entropy, smoothed" => CrossEntropyLossConfig::new()
            .with_smoothing(Some(0.2))
            .init(&device)
            .forward(logits(), batch.classes.clone()),
        "cross-entropy, weighted" => CrossEntropyLossConfig::new()
            .with_weights(weights())
            .init(&device)
            .forward(logits(), batch.classes.clone()),
        "cross-entropy of tokens" => CrossEntropyLossConfig::new()
            .with_pad_tokens(Some(vec![0]))
            .init(&device)
            .forward(net.words(batch), batch.tokens.clone().flatten(0, 1)),
        "cross-entropy of probabilities" => CrossEntropyLossConfig::new()
            .with_logits(false)
            .init(&device)
            .forward(softmax(logits(), 1), batch.classes.clone()),
        "binary cross-entropy" => BinaryCrossEntropyLossConfig::new()
            .with_logits(true)
            .init(&device)
            .forward(logits(), batch.many.clone()),
        "binary cross-entropy, smoothed" => BinaryCrossEntropyLossConfig::new()
            .with_logits(true)
            .with_smoothing(Some(0.1))
            .init(&device)
            .forward(logits(), batch.many.clone()),
        "binary cross-entropy, weighted" => BinaryCrossEntropyLossConfig::new()
            .with_logits(true)
            .with_weights(weights())
            .init(&device)
            .forward(logits(), batch.many.clone()),
        "squares" => MseLoss::new().forward(logits(), batch.y.clone(), Reduction::Mean),
        "squares, summed" => MseLoss::new().forward(logits(), batch.y.clone(), Reduction::Sum),
        "huber" | "huber, summed" => {
            let by = if name == "huber" { Reduction::Mean } else { Reduction::Sum };
            HuberLossConfig::new(0.3).init().forward(logits(), batch.y.clone(), by)
        }
        "divergence" | "divergence by batch" | "divergence, summed" => {
            let by = match name {
                "divergence" => Reduction::Mean,
                "divergence by batch" => Reduction::BatchMean,
                _ => Reduction::Sum,
            };
            let targets = softmax(batch.y.clone(), 1);
            KLDivLossConfig::new().init().forward(log_softmax(logits(), 1), targets, by)
        }
        "smooth l1" => {
            let loss = SmoothL1LossConfig::new().init();
            loss.forward_with_reduction(logits(), batch.y.clone(), Reduction::Mean)
        }
        "cosine" => {
            let targets = batch.gate.clone() * 2 - 1;
            CosineEmbeddingLossConfig::new().init().forward(logits(), batch.y.clone(), targets)
        }
        "poisson" => {
            let loss = PoissonNllLossConfig::new().init();
            loss.forward(logits(), batch.y.clone().abs(), Reduction::Mean)
        }
        "lp" => LpLossConfig::l1().forward(logits(), batch.y.clone(), Reduction::Mean),
        "ctc" => {
            let letters = log_softmax(net.out.forward(net.of_tokens(batch)), 2).swap_dims(0, 1);
            let targets = batch.tokens.clone().slice([0..n, 0..2]).remainder_scalar(4) + 1;
            let long = Tensor::<B, 1, Int>::full([n], LONG as i64, &device);
            let short = Tensor::<B, 1, Int>::full([n], 2, &device);
            let loss = CTCLossConfig::new().init();
            loss.forward_with_reduction(letters, targets, long, short, Reduction::Mean)
        }
        "convolution" => {
            let seen: Tensor<B, 2> = net.conv.forward(batch.images.clone()).flatten(1, 3);
            cross_entropy(net.of_images.forward(seen))
        }
        "attention" => {
            let seen = net.of_tokens(batch).mean_dim(1).squeeze_dim::<2>(1);
            cross_entropy(net.out.forward(seen))
        }
        "group and layer norm" => {
            let normed = net.layer_norm.forward(net.group_norm.forward(hidden()));
            cross_entropy(net.out.forward(normed))
        }
        "batch norm" => cross_entropy(net.out.forward(net.batch_norm.forward(hidden()))),
        "centered by hand" => {
            let hidden = hidden();
            cross_entropy(net.out.forward(hidden.clone() - hidden.mean_dim(0)))
        }
        "real tokens" => real_tokens(),
        "real tokens of each item" => {
            let words = of_words().reshape([n, LONG]) * real();
            (words.sum_dim(1) / (real().sum_dim(1) + 1.0)).mean().neg()
        }
        "masked, at least one" => (squares() * mask()).sum() / mask().sum().clamp_min(1.0),
        "divided by n" => squares().sum() / n as f32,
        "divided by the root of n" => squares().sum() / (n as f32).sqrt(),
        "divided by a constant" => squares().sum() / 64.0,
        "focal" => {
            let seen = sigmoid(logits());
            let missed = seen.clone().neg() + 1.0;
            let yes = seen.clone().clamp(1e-6, 1.0).log().neg() * missed.clone().square() * mask();
            let no = missed.clamp(1e-6, 1.0).log().neg() * seen.square() * (mask().neg() + 1.0);
            (yes.sum() + no.sum()) / mask().sum().clamp_min(1.0)
        }
        "two tasks" => {
            let gate = batch.gate.clone().float().unsqueeze_dim::<2>(1);
            let one = (squares() * gate.clone()).sum() / (gate.sum() + 1.0);
            one + (squares() * mask()).sum() / mask().sum()
        }
        "two tasks and a mean" => {
            cross_entropy(logits()) + (squares() * mask()).sum() / mask().sum()
        }
        "normalized advantages" => {
            let of = batch.y.clone().mean_dim(1).squeeze_dim::<1>(1);
            let (variance, mean) = of.clone().var_mean(0);
            let advantages = (of - mean) / (variance.sqrt() + 1e-6);
            (likelihood() * advantages).mean().neg()
        }
        "softmax over inputs" => (squares() * softmax(batch.y.clone().mean_dim(1), 0)).sum(),
        "weighted by position" => {
            let places = Tensor::<B, 1, Int>::arange(0..n as i64, &device).float();
            (squares() * places.unsqueeze_dim::<2>(1)).mean()
        }
        "penalty beside a mean" => cross_entropy(logits()) + penalty(),
        "penalty beside a sum" => squares().sum() + penalty(),
        "penalty beside real tokens" => real_tokens() + penalty(),
        "means of means" => squares().mean_dim(0).mean(),
        "times a constant" => cross_entropy(logits()) * 1024.0,
        "noise" => {
            let noise = Tensor::random(batch.y.shape(), Distribution::Default, &device);
            (squares() * (noise * 0.0 + 1.0)).mean()
        }
        "time first" => {
            let words: Tensor<B, 2> = net.of_tokens(batch).swap_dims(0, 1).flatten(0, 1);
            let classes: Tensor<B, 1, Int> = batch.ids.clone().swap_dims(0, 1).flatten(0, 1);
            let loss = CrossEntropyLossConfig::new().init(&device);
            loss.forward(net.out.forward(words), classes.remainder_scalar(CLASSES as i64))
        }
        "two views" => {
            let both = Tensor::cat(vec![batch.x.clone(), batch.x.clone() * 0.5 + 0.1], 0);
            let seen = net.first.forward(both).tanh();
            (seen.clone().slice(0..n) - seen.slice(n..2 * n)).square().mean()
        }
        "repeated items" => {
            let seen: Tensor<B, 2> = hidden().unsqueeze_dim::<3>(1).repeat_dim(1, 3).flatten(0, 1);
            let classes: Tensor<B, 1, Int> =
                batch.classes.clone().unsqueeze_dim::<2>(1).repeat_dim(1, 3).flatten(0, 1);
            CrossEntropyLossConfig::new().init(&device).forward(net.out.forward(seen), classes)
        }
        "pairs of its own words" => {
            let words = net.of_tokens(batch);
            words.clone().matmul(words.swap_dims(1, 2)).square().mean()
        }
        "clipped each" => {
            let each = squares().sum_dim(1);
            let scale = each.clone().detach().clamp_max(1.0) / (each.clone().detach() + 0.1);
            (each * scale).mean()
        }
        "uncertainty" => {
            let doubts = net.group_norm.gamma.as_ref().expect("it has one").val();
            let [one, other] = [0, 1].map(|at| doubts.clone().slice(at..at + 1));
            cross_entropy(logits()) * one.clone().neg().exp()
                + one
                + squares().mean() * other.clone().neg().exp()
                + other
        }
        "gram" => {
            let hidden = hidden();
            let gram = hidden.clone().transpose().matmul(hidden);
            (gram * net.second.weight.val()).sum() / n as f32
        }
        "contrast" => {
            let hidden = hidden();
            let likeness = hidden.clone().matmul(hidden.transpose());
            let own = Tensor::<B, 1, Int>::arange(0..n as i64, &device);
            CrossEntropyLossConfig::new().init(&device).forward(likeness, own)
        }
        "root of a mean" => squares().mean().sqrt(),
        "mean over the harder half" => {
            let each = each();
            let limit = each.clone().detach().mean();
            let mask = each.clone().detach().greater_equal(limit).float();
            (each * mask.clone()).sum() / mask.sum()
        }
        "hardest" => each().max(),
        "three hardest" => {
            let each = each();
            let (_, hardest) = each.clone().detach().topk_with_indices(3, 0);
            each.select(0, hardest).mean()
        }
        "dice" => {
            let seen = sigmoid(logits());
            let both = (seen.clone() * mask()).sum() * 2.0;
            (both / (seen.sum() + mask().sum())).neg() + 1.0
        }
        "spread" => {
            let hidden = hidden();
            cross_entropy(net.out.forward(hidden.clone())) + hidden.var(0).mean()
        }
        "running sum" => net.out.forward(hidden().cumsum(0)).square().mean(),
        "first item as anchor" => {
            let hidden = hidden();
            (hidden.clone() - hidden.slice(0..1)).square().mean()
        }
        "the next item" => {
            let hidden = hidden();
            let next = Tensor::cat(vec![hidden.clone().slice(1..n), hidden.clone().slice(0..1)], 0);
            (hidden * next).mean()
        }
        "one item counts more" => squares().slice(0..1).sum() + squares().mean(),
        "numbers that do not cancel" => {
            let counts = batch.y.clone().abs().sum_dim(0) + 0.5;
            ((squares() * counts.clone()).sum_dim(1) / counts * logits().detach()).sum()
        }
        "a sum that is a factor, too" => {
            let of_items = batch.y.clone().abs().mean_dim(1);
            let total = of_items.clone().sum();
            let shares = of_items / total.clone().reshape([1, 1]);
            (squares() * shares).sum() - total * net.second.weight.val().slice([0..1, 0..1]).sum()
        }
        "a mean that is a factor, too" => {
            let mean = batch.y.clone().abs().mean();
            let apart = net.second.weight.val().slice([0..1, 0..1]).sum() - mean.clone();
            (squares() * mean.reshape([1, 1])).sum() + apart.clone() * apart
        }
        "its own denominator beside it" => {
            let count = mask().sum();
            (squares() * mask()).sum() / count.clone() + count * penalty()
        }
        "a count that is a summand, too" => {
            let (count, weights) = (mask().sum(), net.second.weight.val());
            let scaled = (squares() * mask()).sum() * count.clone();
            scaled * weights.clone().detach().sum() + count * weights.sum()
        }
        "a count that n divides, squared" => {
            let share = net.second.weight.val().sum() * mask().sum() / n as f32;
            squares().mean() + share.clone() * share
        }
        "rows that do not cancel" => {
            let of = batch.y.clone() - batch.y.clone().mean_dim(0) + 3.0;
            ((squares() * of.clone()).sum_dim(1) / of * logits().detach()).sum()
        }
        "sevenths of a count" => {
            let whole = batch.many.clone().sum() / 7;
            net.second.weight.val().sum() * whole.float()
        }
        "words that occur" => {
            let none = Tensor::<B, 1, Int>::zeros([WORDS], &device).equal_elem(1);
            let all = batch.tokens.clone().reshape([n * LONG]);
            let ones = all.clone().equal_elem(-1).bool_not();
            let seen = none.select_assign(0, all, ones, IndexingUpdateOp::Add);
            let words = net.embedding.weight.val().sum_dim(1).reshape([WORDS]);
            (words * seen.float()).sum()
        }
        "steps that follow from n" => {
            let weights: Tensor<B, 1> = net.second.weight.val().flatten(0, 1);
            let some = weights.slice(s![n as isize..n as isize + 12; 2]);
            (batch.x.clone() * some.unsqueeze()).sum()
        }
        "a penalty that n divides" => {
            let weights: Tensor<B, 1> = net.second.weight.val().flatten(0, 1);
            let some = weights.slice(0..6) / n as f32;
            (batch.x.clone() * some.clone().unsqueeze()).sum() + some.sum()
        }
        "in the middle of a product" => {
            let rows = logits().slice([0..n, 0..4]).reshape([n, 2, 2]).swap_dims(0, 1);
            let weights = net.second.weight.val().slice([0..4, 0..4]).reshape([2, 2, 4]);
            rows.matmul(weights).square().mean()
        }
        "several numbers in another order" => {
            let counts = batch.y.clone().abs().sum_dim(0);
            let scaled = (logits().detach() * counts.clone()).flip([1]) / counts;
            (scaled * logits()).mean()
        }
        "a detached output by a count" => {
            (logits().detach() / mask().sum().reshape([1, 1]) * logits()).sum()
        }
        "rows above and below" => {
            let shares = (mask() + 0.5) / mask().sum().reshape([1, 1]);
            let of = |scaled: Tensor<B, 2>| (scaled * logits()).sum();
            of(logits().detach() * shares.clone()) + of(logits().detach() / shares)
        }
        "a penalty that a count scales" => (squares().sum() + penalty()) * mask().sum(),
        "a shift beside a penalty" => {
            let mean = batch.y.clone().mean_dim(0) + net.out.weight.val().slice([0..1, 0..CLASSES]);
            (logits() - mean).square().sum() + penalty()
        }
        "paired in another order" => {
            let seen = logits().detach();
            let of_items = seen.clone().slice([0..n, 0..3]).reshape([3 * n, 1]);
            let in_rounds = seen.slice([0..n, 0..1]).repeat_dim(0, 3);
            (of_items * in_rounds).mean() * net.second.weight.val().sum()
        }
        "halves of views" => {
            let views = Tensor::<B, 1, Int>::arange(0..2, &device).float().reshape([2, 1]);
            let views = views.expand([2, 2 * n]).reshape([2 * n, 2]);
            (net.second.forward(hidden()).slice([0..n, 0..4]).reshape([2 * n, 2]) * views).sum()
        }
        "turned around" => {
            let hidden = hidden();
            (hidden.clone() * hidden.flip([0])).mean()
        }
        "sorted against targets" => {
            (each().sort(0) * batch.y.clone().mean_dim(1).squeeze_dim(1)).mean()
        }
        "picked by others" => {
            let hidden = hidden();
            (hidden.clone() * hidden.select(0, batch.gate.clone())).mean()
        }
        "scaled by what is sorted" => (each() * each().detach().sort(0)).mean(),
        "scaled by what is picked" => {
            (each() * each().detach().select(0, batch.gate.clone())).mean()
        }
        "largest of all" => each().max() + squares().mean(),
        "mixed up reshape" => {
            let words = net.of_tokens(batch).swap_dims(0, 1).reshape([n, LONG, WIDE]);
            let seen = net.out.forward(words.mean_dim(1).squeeze_dim::<2>(1));
            (seen - batch.y.clone()).square().mean()
        }
        "balanced experts" => {
            let shares = softmax(logits(), 1).mean_dim(0);
            cross_entropy(logits()) + shares.square().sum() * 2.0
        }
        "squared gram" => {
            let hidden = hidden();
            hidden.clone().transpose().matmul(hidden).square().sum() / (n * n) as f32
        }
        "softmax over items" => (log_softmax(logits(), 0) * batch.y.clone()).mean(),
        "scaled by its own value" => {
            let loss = cross_entropy(logits());
            loss.clone() / loss.detach()
        }
        name => unreachable!("there is no loss {name}"),
    }
}
