//! The models whose memory is predicted and measured: one of each kind, sized so that a training
//! step takes at least 16 MiB.

use burn::data::dataloader::batcher::Batcher;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig, Lstm, LstmConfig,
    PaddingConfig2d,
};
use burn::prelude::*;
use burn::tensor::activation::{gelu, relu};
use burn::tensor::backend::AutodiffBackend;
use burn::train::{ClassificationOutput, InferenceStep, TrainOutput, TrainStep};
use firebox::MicroBatch;

/// Number of classes.
const CLASSES: usize = 10;

/// The architectures.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    Mlp,
    Cnn,
    Encoder,
    Lstm,
    /// An encoder on sequences of ten lengths.
    Lengths,
    /// The convolutions with detached output, so that only the head learns.
    Detached,
    /// An MLP with many classes, whose metrics see whole batches.
    Wide,
    /// An MLP whose step takes 64 MiB of host memory itself.
    Hoarding,
    /// A small LSTM on long sequences: few bytes and many operations.
    Long,
}

impl Kind {
    /// Shape of one item.
    fn item(self) -> [usize; 2] {
        match self {
            Self::Mlp | Self::Wide | Self::Hoarding => [1, 512],
            Self::Cnn | Self::Detached => [3, 32 * 32],
            Self::Encoder | Self::Lengths => [64, 64],
            Self::Lstm => [48, 32],
            Self::Long => [72, 8],
        }
    }
}

#[derive(Clone, Debug, MicroBatch)]
pub struct Items<B: Backend> {
    /// `[items, rows, features]`
    pub inputs: Tensor<B, 3>,
    /// `[items]`
    pub targets: Tensor<B, 1, Int>,
}

/// Makes batches from the numbers of their items alone.
#[derive(Clone, Debug)]
pub struct Numbered(pub Kind);

impl<B: Backend> Batcher<B, usize, Items<B>> for Numbered {
    fn batch(&self, items: Vec<usize>, device: &B::Device) -> Items<B> {
        let [mut rows, features] = self.0.item();
        if let (Kind::Lengths, Some(first)) = (self.0, items.first()) {
            rows = 10 + first * 7919 % 1013 % 10 * 6;
        }
        let value = |i: usize| ((i * 7919 % 1013) as f32 / 1013.0 - 0.5) * 2.0;
        // Allocated with exact size: spare capacity of a vector stays with the tensor that takes it
        // over.
        let mut inputs = Vec::with_capacity(items.len() * rows * features);
        for item in &items {
            inputs.extend((0..rows * features).map(|i| value(item * 31 + i)));
        }
        let targets: Vec<i32> = items.iter().map(|item| (item % CLASSES) as i32).collect();
        Items {
            inputs: Tensor::from_data(
                TensorData::new(inputs, [items.len(), rows, features]),
                device,
            ),
            targets: Tensor::from_data(TensorData::new(targets, [items.len()]), device),
        }
    }
}

#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant, reason = "there is one")]
pub enum Body<B: Backend> {
    Mlp(Mlp<B>),
    Cnn(Cnn<B>),
    Encoder(Encoder<B>),
    Lstm(Recurrent<B>),
}

#[derive(Module, Debug)]
pub struct Mlp<B: Backend> {
    layers: Vec<Linear<B>>,
    dropout: Dropout,
}

#[derive(Module, Debug)]
pub struct Cnn<B: Backend> {
    first: Conv2d<B>,
    first_norm: BatchNorm<B>,
    second: Conv2d<B>,
    second_norm: BatchNorm<B>,
    pool: MaxPool2d,
    dropout: Dropout,
}

#[derive(Module, Debug)]
pub struct Encoder<B: Backend> {
    embed: Linear<B>,
    encoder: TransformerEncoder<B>,
}

#[derive(Module, Debug)]
pub struct Recurrent<B: Backend> {
    lstm: Lstm<B>,
}

/// A body with a linear layer on top.
#[derive(Module, Debug)]
pub struct Model<B: Backend> {
    body: Body<B>,
    head: Linear<B>,
    is_detached: bool,
    /// Bytes that a step allocates in addition to its tensors.
    hoards: usize,
}

impl<B: Backend> Model<B> {
    pub fn new(kind: Kind, device: &B::Device) -> Self {
        let conv = |channels| {
            Conv2dConfig::new(channels, [3, 3]).with_padding(PaddingConfig2d::Same).init(device)
        };
        let (body, features) = match kind {
            Kind::Mlp | Kind::Wide | Kind::Hoarding => {
                let layer = |inputs| LinearConfig::new(inputs, 768).init(device);
                let layers = vec![layer(512), layer(768), layer(768)];
                (Body::Mlp(Mlp { layers, dropout: DropoutConfig::new(0.2).init() }), 768)
            }
            Kind::Cnn | Kind::Detached => {
                let cnn = Cnn {
                    first: conv([3, 16]),
                    first_norm: BatchNormConfig::new(16).init(device),
                    second: conv([16, 24]),
                    second_norm: BatchNormConfig::new(24).init(device),
                    pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
                    dropout: DropoutConfig::new(0.25).init(),
                };
                (Body::Cnn(cnn), 24 * 8 * 8)
            }
            Kind::Encoder | Kind::Lengths => {
                let config = TransformerEncoderConfig::new(128, 256, 4, 2);
                let embed = LinearConfig::new(64, 128).init(device);
                (Body::Encoder(Encoder { embed, encoder: config.init(device) }), 128)
            }
            Kind::Lstm => {
                let lstm = LstmConfig::new(32, 128, true).init(device);
                (Body::Lstm(Recurrent { lstm }), 128)
            }
            Kind::Long => {
                let lstm = LstmConfig::new(8, 16, true).init(device);
                (Body::Lstm(Recurrent { lstm }), 16)
            }
        };
        let classes = if matches!(kind, Kind::Wide) { 1_000 } else { CLASSES };
        let head = LinearConfig::new(features, classes).init(device);
        let hoards = if matches!(kind, Kind::Hoarding) { 64 << 20 } else { 0 };
        Self { body, head, is_detached: matches!(kind, Kind::Detached), hoards }
    }

    /// Maps inputs `[items, rows, features]` to logits `[items, classes]`.
    fn forward(&self, inputs: Tensor<B, 3>) -> Tensor<B, 2> {
        let x = match &self.body {
            Body::Mlp(mlp) => {
                let mut x = inputs.flatten(1, 2);
                for layer in &mlp.layers {
                    x = mlp.dropout.forward(gelu(layer.forward(x)));
                }
                x
            }
            Body::Cnn(cnn) => {
                let [items, channels, _] = inputs.dims();
                let x = inputs.reshape([items, channels, 32, 32]);
                let x = cnn.pool.forward(relu(cnn.first_norm.forward(cnn.first.forward(x))));
                let x = cnn.pool.forward(relu(cnn.second_norm.forward(cnn.second.forward(x))));
                cnn.dropout.forward(x.flatten(1, 3))
            }
            Body::Encoder(model) => {
                let x = TransformerEncoderInput::new(model.embed.forward(inputs));
                model.encoder.forward(x).mean_dim(1).squeeze_dim(1)
            }
            Body::Lstm(model) => model.lstm.forward(inputs, None).1.hidden,
        };
        self.head.forward(if self.is_detached { x.detach() } else { x })
    }

    fn classify(&self, items: Items<B>) -> ClassificationOutput<B> {
        let output = self.forward(items.inputs);
        let loss = CrossEntropyLossConfig::new()
            .init(&output.device())
            .forward(output.clone(), items.targets.clone());
        ClassificationOutput::new(loss, output, items.targets)
    }
}

impl<B: AutodiffBackend> TrainStep for Model<B> {
    type Input = Items<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, items: Items<B>) -> TrainOutput<ClassificationOutput<B>> {
        let output = self.classify(items);
        drop(std::hint::black_box(vec![1_u8; self.hoards]));
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl<B: Backend> InferenceStep for Model<B> {
    type Input = Items<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, items: Items<B>) -> ClassificationOutput<B> {
        self.classify(items)
    }
}
