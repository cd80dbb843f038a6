//! Models of random layers. They map sequences of vectors or tokens to a row of numbers per
//! position or per item.

use burn::module::Module;
use burn::nn::attention::{
    MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, generate_autoregressive_mask,
};
use burn::nn::conv::{Conv1d, Conv1dConfig, Conv2d, Conv2dConfig};
use burn::nn::gru::{Gru, GruConfig};
use burn::nn::{
    Embedding, EmbeddingConfig, Gelu, GroupNorm, GroupNormConfig, InstanceNorm, InstanceNormConfig,
    LayerNorm, LayerNormConfig, Linear, LinearConfig, Lstm, LstmConfig, PaddingConfig1d,
    PaddingConfig2d, RmsNorm, RmsNormConfig, Tanh,
};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::{InferenceStep, TrainOutput, TrainStep};

use crate::task::{Batch, CLASSES, Judge, VOCABULARY};

/// Width of every layer.
pub const WIDTH: usize = 4;

/// Kinds of layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Linear,
    Conv1d,
    Conv2d,
    Attention,
    Lstm,
    Gru,
    LayerNorm,
    RmsNorm,
    GroupNorm,
    InstanceNorm,
    Gelu,
    Tanh,
}

/// One position in a model.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub kind: Kind,
    /// Whether the input is added to the output.
    pub residual: bool,
    /// Whether the layer runs a second time after the last one, with the same parameters.
    pub again: bool,
    /// Whether its parameters are trained.
    pub trained: bool,
}

/// A layer that maps `[items, length, WIDTH]` to the same shape.
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant, reason = "there are few")]
enum Layer<B: Backend> {
    Linear(Linear<B>),
    Conv1d(Conv1d<B>),
    Conv2d(Conv2d<B>),
    Attention(MultiHeadAttention<B>),
    Lstm(Lstm<B>),
    Gru(Gru<B>),
    LayerNorm(LayerNorm<B>),
    RmsNorm(RmsNorm<B>),
    GroupNorm(GroupNorm<B>),
    InstanceNorm(InstanceNorm<B>),
    Gelu(Gelu),
    Tanh(Tanh),
}

impl<B: Backend> Layer<B> {
    fn new(kind: Kind, device: &B::Device) -> Self {
        match kind {
            Kind::Linear => Self::Linear(LinearConfig::new(WIDTH, WIDTH).init(device)),
            Kind::Conv1d => {
                let config = Conv1dConfig::new(WIDTH, WIDTH, 3);
                Self::Conv1d(config.with_padding(PaddingConfig1d::Same).init(device))
            }
            Kind::Conv2d => {
                let config = Conv2dConfig::new([1, 1], [3, 3]);
                Self::Conv2d(config.with_padding(PaddingConfig2d::Same).init(device))
            }
            Kind::Attention => {
                let config = MultiHeadAttentionConfig::new(WIDTH, 2).with_dropout(0.0);
                Self::Attention(config.init(device))
            }
            Kind::Lstm => Self::Lstm(LstmConfig::new(WIDTH, WIDTH, true).init(device)),
            Kind::Gru => Self::Gru(GruConfig::new(WIDTH, WIDTH, true).init(device)),
            Kind::LayerNorm => Self::LayerNorm(LayerNormConfig::new(WIDTH).init(device)),
            Kind::RmsNorm => Self::RmsNorm(RmsNormConfig::new(WIDTH).init(device)),
            Kind::GroupNorm => Self::GroupNorm(GroupNormConfig::new(2, WIDTH).init(device)),
            Kind::InstanceNorm => Self::InstanceNorm(InstanceNormConfig::new(WIDTH).init(device)),
            Kind::Gelu => Self::Gelu(Gelu::new()),
            Kind::Tanh => Self::Tanh(Tanh::new()),
        }
    }

    fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        let channels = |x: Tensor<B, 3>| x.swap_dims(1, 2);
        match self {
            Self::Linear(linear) => linear.forward(x),
            Self::Conv1d(conv) => channels(conv.forward(channels(x))),
            Self::Conv2d(conv) => conv.forward(x.unsqueeze_dim::<4>(1)).squeeze_dim::<3>(1),
            Self::Attention(attention) => {
                let [items, length, _] = x.dims();
                let mask = generate_autoregressive_mask::<B>(items, length, &x.device());
                attention.forward(MhaInput::self_attn(x).mask_attn(mask)).context
            }
            Self::Lstm(lstm) => lstm.forward(x, None).0,
            Self::Gru(gru) => gru.forward(x, None),
            Self::LayerNorm(norm) => norm.forward(x),
            Self::RmsNorm(norm) => norm.forward(x),
            Self::GroupNorm(norm) => channels(norm.forward(channels(x))),
            Self::InstanceNorm(norm) => channels(norm.forward(channels(x))),
            Self::Gelu(gelu) => gelu.forward(x),
            Self::Tanh(tanh) => tanh.forward(x),
        }
    }
}

/// A model of random layers, with its loss.
#[derive(Module, Debug)]
pub struct Model<B: Backend> {
    embedding: Option<Embedding<B>>,
    layers: Vec<Layer<B>>,
    #[module(skip)]
    places: Vec<Place>,
    head: Linear<B>,
    #[module(skip)]
    judge: Judge,
}

impl<B: Backend> Model<B> {
    pub fn new(tokens: bool, places: &[Place], judge: Judge, device: &B::Device) -> Self {
        let layer = |place: &Place| {
            let layer = Layer::new(place.kind, device);
            if place.trained { layer } else { layer.no_grad() }
        };
        Self {
            embedding: tokens.then(|| EmbeddingConfig::new(VOCABULARY, WIDTH).init(device)),
            layers: places.iter().map(layer).collect(),
            places: places.to_vec(),
            head: LinearConfig::new(WIDTH, CLASSES).init(device),
            judge,
        }
    }

    fn loss(&self, batch: Batch<B>) -> Tensor<B, 1> {
        let mut x = match &self.embedding {
            Some(embedding) => embedding.forward(batch.tokens.clone()),
            None => batch.vectors.clone(),
        };
        let all = || self.layers.iter().zip(&self.places);
        for (layer, place) in all().chain(all().filter(|(_, place)| place.again)) {
            let y = layer.forward(x.clone());
            x = if place.residual { x + y } else { y };
        }
        // Outputs are scaled up so that losses differ.
        let output = self.head.forward(x).mul_scalar(3.0);
        let head = self.head.weight.val();
        self.judge.loss(output, &batch, head)
    }
}

impl<B: AutodiffBackend> TrainStep for Model<B> {
    type Input = Batch<B>;
    type Output = ();

    fn step(&self, batch: Batch<B>) -> TrainOutput<()> {
        TrainOutput::new(self, self.loss(batch).backward(), ())
    }
}

impl<B: Backend> InferenceStep for Model<B> {
    type Input = Batch<B>;
    type Output = ();

    fn step(&self, batch: Batch<B>) {
        self.loss(batch);
    }
}
