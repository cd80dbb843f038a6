//! Programs that tests run on real and on dry devices: models, and two iterations of training.

#![allow(dead_code, reason = "no test runs all of them")]

use burn::backend::Autodiff;
use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Embedding, EmbeddingConfig, Linear,
    LinearConfig, PaddingConfig2d, Relu,
};
use burn::optim::{AdamConfig, GradientsParams, Optimizer};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Int, Tensor, TensorData};
use firebox_lazy::{Lazy, LazyBackend, StepRecorder, initialize, mark};
use firebox_trace::Trace;

/// A model and its training data.
pub trait Task<B: Backend>: Module<B> {
    /// The model, with every parameter initialized.
    fn new(device: &B::Device) -> Self;

    /// The loss on a batch of host data.
    fn loss(&self, items: usize, device: &B::Device) -> Tensor<B, 1>;
}

/// Two iterations with Adam, from host data to updated weights.
pub fn train<B: AutodiffBackend, M: Task<B> + burn::module::AutodiffModule<B>>(
    model: &M,
    items: usize,
    device: &B::Device,
) {
    let mut model = model.clone();
    let mut optimizer = AdamConfig::new().init();
    for _ in 0..2 {
        let loss = model.loss(items, device);
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-3, model, gradients);
    }
}

/// The trace of these two iterations, recorded on `L`.
pub fn record<L, M>(items: usize, device: &L::Device) -> Trace
where
    L: Backend,
    Autodiff<Lazy<L>>: AutodiffBackend<Device = L::Device> + LazyBackend<Base = L>,
    M: Task<Autodiff<Lazy<L>>> + burn::module::AutodiffModule<Autodiff<Lazy<L>>>,
{
    let model = M::new(device);
    // Not a rehearsal: that would keep the running statistics in order to restore them.
    let recording = StepRecorder::new().refuse_reads().record::<L, _>(|| {
        mark::<L>("begin");
        train(&model, items, device);
    });
    let trace = recording.expect("the program reads nothing").discard().trace;
    assert_eq!(trace.check(), Ok(()));
    trace
}

fn zeros<B: Backend, const D: usize>(shape: [usize; D], device: &B::Device) -> Tensor<B, D> {
    Tensor::from_data(TensorData::zeros::<f32, _>(shape), device)
}

fn integers<B: Backend, const D: usize>(
    shape: [usize; D],
    device: &B::Device,
) -> Tensor<B, D, Int> {
    Tensor::from_data(TensorData::zeros::<i32, _>(shape), device)
}

fn cross_entropy<B: Backend>(scores: Tensor<B, 2>, device: &B::Device) -> Tensor<B, 1> {
    let targets = integers::<B, 1>([scores.dims()[0]], device);
    CrossEntropyLossConfig::new().init(device).forward(scores, targets)
}

/// Convolution, batch norm, dropout, linear.
#[derive(Module, Debug)]
pub struct Classifier<B: Backend> {
    conv: Conv2d<B>,
    norm: BatchNorm<B>,
    dropout: Dropout,
    hidden: Linear<B>,
    output: Linear<B>,
    relu: Relu,
}

impl<B: Backend> Task<B> for Classifier<B> {
    fn new(device: &B::Device) -> Self {
        let padding = PaddingConfig2d::Same;
        let model = Self {
            conv: Conv2dConfig::new([1, 8], [3, 3]).with_padding(padding).init(device),
            norm: BatchNormConfig::new(8).init(device),
            dropout: DropoutConfig::new(0.3).init(),
            hidden: LinearConfig::new(8 * 14 * 14, 64).init(device),
            output: LinearConfig::new(64, 10).init(device),
            relu: Relu::new(),
        };
        initialize::<B, _>(&model);
        model
    }

    fn loss(&self, items: usize, device: &B::Device) -> Tensor<B, 1> {
        let images = zeros::<B, 4>([items, 1, 14, 14], device);
        let features = self.relu.forward(self.norm.forward(self.conv.forward(images)));
        let features = self.dropout.forward(features).flatten::<2>(1, 3);
        let hidden = self.relu.forward(self.hidden.forward(features));
        cross_entropy(self.output.forward(hidden), device)
    }
}

/// Embedding, two layers of a transformer encoder, linear.
#[derive(Module, Debug)]
pub struct Language<B: Backend> {
    embedding: Embedding<B>,
    encoder: TransformerEncoder<B>,
    output: Linear<B>,
}

impl<B: Backend> Task<B> for Language<B> {
    fn new(device: &B::Device) -> Self {
        let encoder = TransformerEncoderConfig::new(64, 256, 4, 2).with_dropout(0.1);
        let model = Self {
            embedding: EmbeddingConfig::new(100, 64).init(device),
            encoder: encoder.init(device),
            output: LinearConfig::new(64, 100).init(device),
        };
        initialize::<B, _>(&model);
        model
    }

    fn loss(&self, items: usize, device: &B::Device) -> Tensor<B, 1> {
        let text = integers::<B, 2>([items, 32], device);
        let embedded = self.embedding.forward(text);
        let encoded = self.encoder.forward(TransformerEncoderInput::new(embedded));
        cross_entropy(self.output.forward(encoded).flatten::<2>(0, 1), device)
    }
}

/// Three linear layers.
#[derive(Module, Debug)]
pub struct Perceptron<B: Backend> {
    input: Linear<B>,
    hidden: Linear<B>,
    output: Linear<B>,
    relu: Relu,
}

impl<B: Backend> Task<B> for Perceptron<B> {
    fn new(device: &B::Device) -> Self {
        let model = Self {
            input: LinearConfig::new(784, 512).init(device),
            hidden: LinearConfig::new(512, 512).init(device),
            output: LinearConfig::new(512, 10).init(device),
            relu: Relu::new(),
        };
        initialize::<B, _>(&model);
        model
    }

    fn loss(&self, items: usize, device: &B::Device) -> Tensor<B, 1> {
        let images = zeros::<B, 2>([items, 784], device);
        let hidden = self.relu.forward(self.input.forward(images));
        let hidden = self.relu.forward(self.hidden.forward(hidden));
        cross_entropy(self.output.forward(hidden), device)
    }
}
