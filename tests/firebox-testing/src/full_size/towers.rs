//! Two towers that are trained to give matching pairs similar embeddings, as in CLIP (Radford et
//! al., "Learning transferable visual models from natural language supervision", 2021): a
//! contrastive loss over all pairs of the batch.

use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::{InferenceStep, TrainOutput, TrainStep};
use firebox::MicroBatch;

const VOCABULARY: usize = 4096;
const LENGTH: usize = 64;
const WIDTH: usize = 512;
const EMBEDDING: usize = 256;

/// Pairs of texts.
#[derive(Clone, Debug, MicroBatch)]
pub struct Pairs<B: Backend> {
    /// `[items, 64]`
    pub one: Tensor<B, 2, Int>,
    /// `[items, 64]`
    pub other: Tensor<B, 2, Int>,
}

impl<B: Backend> Pairs<B> {
    pub fn new(items: usize, device: &B::Device) -> Self {
        let text = |from: i64| {
            let tokens = Tensor::<B, 1, Int>::arange(from..from + (items * LENGTH) as i64, device);
            tokens.remainder_scalar(VOCABULARY as i64).reshape([items, LENGTH])
        };
        Self { one: text(0), other: text(7) }
    }
}

#[derive(Module, Debug)]
struct Tower<B: Backend> {
    tokens: Embedding<B>,
    blocks: TransformerEncoder<B>,
    head: Linear<B>,
}

impl<B: Backend> Tower<B> {
    fn new(layers: usize, device: &B::Device) -> Self {
        Self {
            tokens: EmbeddingConfig::new(VOCABULARY, WIDTH).init(device),
            blocks: TransformerEncoderConfig::new(WIDTH, 4 * WIDTH, WIDTH / 64, layers)
                .with_dropout(0.0)
                .with_norm_first(true)
                .init(device),
            head: LinearConfig::new(WIDTH, EMBEDDING).init(device),
        }
    }

    /// Embeddings of length one: `[items, 256]`.
    fn embed(&self, texts: Tensor<B, 2, Int>) -> Tensor<B, 2> {
        let x = TransformerEncoderInput::new(self.tokens.forward(texts));
        let x: Tensor<B, 2> = self.blocks.forward(x).mean_dim(1).squeeze_dim(1);
        let x = self.head.forward(x);
        let length = x.clone().powf_scalar(2.0).sum_dim(1).sqrt();
        x / length
    }
}

#[derive(Module, Debug)]
pub struct Towers<B: Backend> {
    one: Tower<B>,
    other: Tower<B>,
}

impl<B: Backend> Towers<B> {
    /// Two towers of `layers` layers.
    pub fn new(layers: usize, device: &B::Device) -> Self {
        Self { one: Tower::new(layers, device), other: Tower::new(layers, device) }
    }

    fn loss(&self, pairs: Pairs<B>) -> Tensor<B, 1> {
        let [items, _] = pairs.one.dims();
        let device = pairs.one.device();
        let (one, other) = (self.one.embed(pairs.one), self.other.embed(pairs.other));
        let similar = one.matmul(other.transpose()) * 20.0;
        let own = Tensor::arange(0..items as i64, &device);
        let loss = CrossEntropyLossConfig::new().init(&device);
        (loss.forward(similar.clone(), own.clone()) + loss.forward(similar.transpose(), own)) * 0.5
    }
}

impl<B: AutodiffBackend> TrainStep for Towers<B> {
    type Input = Pairs<B>;
    type Output = ();

    fn step(&self, pairs: Pairs<B>) -> TrainOutput<()> {
        TrainOutput::new(self, self.loss(pairs).backward(), ())
    }
}

impl<B: Backend> InferenceStep for Towers<B> {
    type Input = Pairs<B>;
    type Output = ();

    fn step(&self, pairs: Pairs<B>) {
        self.loss(pairs);
    }
}
