//! A GPT made of burn's own modules: embeddings, a transformer encoder with a causal mask, and a
//! linear head.

use burn::nn::attention::generate_autoregressive_mask;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::{ClassificationOutput, InferenceStep, TrainOutput, TrainStep};
use firebox::MicroBatch;

pub const VOCABULARY: usize = 8192;

#[derive(Module, Debug)]
pub struct Gpt<B: Backend> {
    tokens: Embedding<B>,
    positions: Embedding<B>,
    blocks: TransformerEncoder<B>,
    norm: LayerNorm<B>,
    head: Linear<B>,
}

/// Texts, and the same texts shifted by one token.
#[derive(Clone, Debug, MicroBatch)]
pub struct Texts<B: Backend> {
    /// `[items, length]`
    pub tokens: Tensor<B, 2, Int>,
    /// `[items, length]`
    pub next: Tensor<B, 2, Int>,
}

impl<B: Backend> Texts<B> {
    pub fn new(items: usize, length: usize, device: &B::Device) -> Self {
        let text = |from: i64| {
            let tokens = Tensor::<B, 1, Int>::arange(from..from + (items * length) as i64, device);
            tokens.remainder_scalar(VOCABULARY as i64).reshape([items, length])
        };
        Self { tokens: text(0), next: text(1) }
    }
}

impl<B: Backend> Gpt<B> {
    /// Creates `layers` layers of `width` features, for texts of up to `length` tokens.
    pub fn new(layers: usize, width: usize, length: usize, device: &B::Device) -> Self {
        Self::with_dropout(0.1, layers, width, length, device)
    }

    /// The same with another probability of dropout.
    pub fn with_dropout(
        dropout: f64,
        layers: usize,
        width: usize,
        length: usize,
        device: &B::Device,
    ) -> Self {
        Self {
            tokens: EmbeddingConfig::new(VOCABULARY, width).init(device),
            positions: EmbeddingConfig::new(length, width).init(device),
            blocks: TransformerEncoderConfig::new(width, 4 * width, width / 64, layers)
                .with_norm_first(true)
                .with_dropout(dropout)
                .init(device),
            norm: LayerNormConfig::new(width).init(device),
            head: LinearConfig::new(width, VOCABULARY).with_bias(false).init(device),
        }
    }

    fn classify(&self, texts: Texts<B>) -> ClassificationOutput<B> {
        let [items, length] = texts.tokens.dims();
        let device = texts.tokens.device();
        let positions = Tensor::arange(0..length as i64, &device).unsqueeze::<2>();
        let x = self.tokens.forward(texts.tokens) + self.positions.forward(positions);
        let mask = generate_autoregressive_mask(items, length, &device);
        let x = self.blocks.forward(TransformerEncoderInput::new(x).mask_attn(mask));
        let logits = self.head.forward(self.norm.forward(x));
        let logits = logits.reshape([items * length, VOCABULARY]);
        let next = texts.next.reshape([items * length]);
        let loss =
            CrossEntropyLossConfig::new().init(&device).forward(logits.clone(), next.clone());
        ClassificationOutput::new(loss, logits, next)
    }
}

impl<B: AutodiffBackend> TrainStep for Gpt<B> {
    type Input = Texts<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, texts: Texts<B>) -> TrainOutput<ClassificationOutput<B>> {
        let item = self.classify(texts);
        TrainOutput::new(self, item.loss.backward(), item)
    }
}

impl<B: Backend> InferenceStep for Gpt<B> {
    type Input = Texts<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, texts: Texts<B>) -> ClassificationOutput<B> {
        self.classify(texts)
    }
}
