//! A small GPT that works on characters.

use burn::nn::attention::generate_autoregressive_mask;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::prelude::*;
use burn::tensor::activation::{log_softmax, softmax};
use burn::tensor::backend::AutodiffBackend;
use burn::train::{ClassificationOutput, InferenceStep, TrainOutput, TrainStep};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::text::{END, LONGEST, Lines, PADDING, TOKENS, character};

const WIDTH: usize = 96;

#[derive(Module, Debug)]
pub struct Gpt<B: Backend> {
    tokens: Embedding<B>,
    positions: Embedding<B>,
    layers: TransformerEncoder<B>,
    output: Linear<B>,
}

impl<B: Backend> Gpt<B> {
    pub fn new(device: &B::Device) -> Self {
        let layers = TransformerEncoderConfig::new(WIDTH, 4 * WIDTH, 4, 3);
        Self {
            tokens: EmbeddingConfig::new(TOKENS, WIDTH).init(device),
            positions: EmbeddingConfig::new(LONGEST + 1, WIDTH).init(device),
            layers: layers.with_norm_first(true).with_dropout(0.0).init(device),
            output: LinearConfig::new(WIDTH, TOKENS).init(device),
        }
    }

    /// Maps tokens `[lines, length]` to logits `[lines, length, tokens]`.
    fn forward(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        let ([lines, length], device) = (tokens.dims(), tokens.device());
        let positions = Tensor::arange(0..length as i64, &device).unsqueeze::<2>();
        let x = self.tokens.forward(tokens) + self.positions.forward(positions);
        let earlier = generate_autoregressive_mask(lines, length, &device);
        self.output.forward(self.layers.forward(TransformerEncoderInput::new(x).mask_attn(earlier)))
    }

    /// Predicts the next characters. The loss is a mean over the characters that are not padding.
    pub fn predict(&self, lines: Lines<B>) -> ClassificationOutput<B> {
        let logits = self.forward(lines.tokens).reshape([-1, TOKENS as i32]);
        let next: Tensor<B, 1, Int> = lines.next.flatten(0, 1);
        let counts = next.clone().not_equal_elem(PADDING).float();
        let right = log_softmax(logits.clone(), 1).gather(1, next.clone().unsqueeze_dim(1));
        let loss = -(right.squeeze_dim(1) * counts.clone()).sum() / counts.sum();
        ClassificationOutput::new(loss, logits, next)
    }

    /// Writes a text of `characters` characters.
    pub fn write(&self, characters: usize, seed: u64) -> String {
        let mut rng = StdRng::seed_from_u64(seed);
        let device = self.devices()[0].clone();
        let (mut text, mut line) = (String::new(), vec![END]);
        for _ in 0..characters {
            let tokens = TensorData::new(line.clone(), [1, line.len()]);
            let logits = self.forward(Tensor::from_data(tokens, &device));
            let last = logits.narrow(1, line.len() - 1, 1).flatten::<1>(0, 2);
            let likely: Vec<f32> = softmax(last / 0.7, 0).into_data().iter().collect();
            let mut left = rng.random_range(0.0..1.0);
            let drawn = likely.iter().position(|share| {
                left -= share;
                left <= 0.0
            });
            let token = drawn.map_or(END, |token| token as i32);
            if token == END || line.len() == LONGEST {
                text.push('\n');
                line.truncate(1);
            } else {
                text.push(character(token));
                line.push(token);
            }
        }
        text
    }
}

impl<B: AutodiffBackend> TrainStep for Gpt<B> {
    type Input = Lines<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, lines: Lines<B>) -> TrainOutput<ClassificationOutput<B>> {
        let item = self.predict(lines);
        TrainOutput::new(self, item.loss.backward(), item)
    }
}

impl<B: Backend> InferenceStep for Gpt<B> {
    type Input = Lines<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, lines: Lines<B>) -> ClassificationOutput<B> {
        self.predict(lines)
    }
}
