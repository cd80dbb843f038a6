//! A GPT made of burn's own modules: 12 layers, 768 wide, 12 heads, a vocabulary of 8,192.

use std::marker::PhantomData;

use burn::nn::attention::generate_autoregressive_mask;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;

use super::cross_entropy;
use crate::search::Subject;

const VOCABULARY: usize = 8192;
const LAYERS: usize = 12;
const WIDTH: usize = 768;

/// Batches of texts, all of one length.
pub struct Gpt<B> {
    tokens: usize,
    backend: PhantomData<fn() -> B>,
}

impl<B> Gpt<B> {
    /// Creates the model for texts of `tokens` tokens.
    pub fn new(tokens: usize) -> Self {
        Self { tokens, backend: PhantomData }
    }
}

#[derive(Module, Debug)]
pub struct Layers<B: Backend> {
    tokens: Embedding<B>,
    positions: Embedding<B>,
    blocks: TransformerEncoder<B>,
    norm: LayerNorm<B>,
    head: Linear<B>,
}

impl<B: AutodiffBackend> Subject<B> for Gpt<B> {
    type Model = Layers<B>;
    /// Texts, and the same texts shifted by one token.
    type Batch = (Tensor<B, 2, Int>, Tensor<B, 1, Int>);

    fn title(&self) -> String {
        format!("a GPT of {LAYERS} layers, {WIDTH} wide, on texts of {} tokens", self.tokens)
    }

    fn typical(&self) -> usize {
        2
    }

    fn model(&self, device: &B::Device) -> Layers<B> {
        let blocks = TransformerEncoderConfig::new(WIDTH, 4 * WIDTH, WIDTH / 64, LAYERS);
        Layers {
            tokens: EmbeddingConfig::new(VOCABULARY, WIDTH).init(device),
            positions: EmbeddingConfig::new(self.tokens, WIDTH).init(device),
            blocks: blocks.with_norm_first(true).init(device),
            norm: LayerNormConfig::new(WIDTH).init(device),
            head: LinearConfig::new(WIDTH, VOCABULARY).with_bias(false).init(device),
        }
    }

    fn batch(&self, items: usize, device: &B::Device) -> Self::Batch {
        (Tensor::zeros([items, self.tokens], device), Tensor::zeros([items * self.tokens], device))
    }

    fn loss(&self, model: &Layers<B>, (texts, next): &Self::Batch) -> Tensor<B, 1> {
        let [items, length] = texts.dims();
        let device = texts.device();
        let positions = Tensor::arange(0..length as i64, &device).unsqueeze::<2>();
        let x = model.tokens.forward(texts.clone()) + model.positions.forward(positions);
        let mask = generate_autoregressive_mask(items, length, &device);
        let x = model.blocks.forward(TransformerEncoderInput::new(x).mask_attn(mask));
        let logits = model.head.forward(model.norm.forward(x));
        cross_entropy(logits.reshape([items * length, VOCABULARY]), next.clone())
    }
}
