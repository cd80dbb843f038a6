//! A GPT over characters: embeddings, causal attention, and logits for every position.

use burn::nn::attention::generate_autoregressive_mask;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::prelude::*;
use burn::train::ClassificationOutput;

use super::Zoo;
use super::batches::{Texts, classified, texts};

const CHARACTERS: usize = 96;
const LENGTH: usize = 64;
const WIDTH: usize = 32;

#[derive(Module, Debug)]
pub struct Gpt<B: Backend> {
    tokens: Embedding<B>,
    positions: Embedding<B>,
    layers: TransformerEncoder<B>,
    norm: LayerNorm<B>,
    head: Linear<B>,
}

impl<B: Backend> Zoo<B> for Gpt<B> {
    const NAME: &'static str = "gpt";
    const ITEMS: usize = 200;
    type Batch = Texts<B>;

    fn new(device: &B::Device) -> Self {
        Self {
            tokens: EmbeddingConfig::new(CHARACTERS, WIDTH).init(device),
            positions: EmbeddingConfig::new(LENGTH, WIDTH).init(device),
            layers: TransformerEncoderConfig::new(WIDTH, 4 * WIDTH, 2, 2)
                .with_norm_first(true)
                .init(device),
            norm: LayerNormConfig::new(WIDTH).init(device),
            head: LinearConfig::new(WIDTH, CHARACTERS).with_bias(false).init(device),
        }
    }

    fn batch(items: &[usize], device: &B::Device) -> Texts<B> {
        Texts {
            tokens: texts(items, (0, LENGTH, CHARACTERS), device),
            next: texts(items, (1, LENGTH, CHARACTERS), device),
        }
    }
}

impl<B: Backend> Gpt<B> {
    fn output(&self, batch: Texts<B>) -> ClassificationOutput<B> {
        let [items, length] = batch.tokens.dims();
        let device = batch.tokens.device();
        let positions = Tensor::arange(0..length as i64, &device).unsqueeze::<2>();
        let x = self.tokens.forward(batch.tokens) + self.positions.forward(positions);
        let mask = generate_autoregressive_mask(items, length, &device);
        let x = self.layers.forward(TransformerEncoderInput::new(x).mask_attn(mask));
        let logits = self.head.forward(self.norm.forward(x));
        classified(
            logits.reshape([items * length, CHARACTERS]),
            batch.next.reshape([items * length]),
        )
    }
}

steps!(Gpt: Texts -> ClassificationOutput);
