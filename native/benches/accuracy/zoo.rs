//! Models of seven kinds, small enough to be rehearsed often.

use burn::module::Module;
use burn::nn::attention::generate_autoregressive_mask;
use burn::nn::conv::{Conv2d, Conv2dConfig, ConvTranspose2d, ConvTranspose2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig, MaxPool2d, MaxPool2dConfig};
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Embedding, EmbeddingConfig, LayerNorm,
    LayerNormConfig, Linear, LinearConfig, Lstm, LstmConfig, PaddingConfig2d,
};
use burn::tensor::activation::{gelu, relu, sigmoid};
use burn::tensor::{Device, Int, Tensor, TensorData};
use firebox::MicroBatch;

/// A model with batches of its own.
pub trait Zoo: Module {
    type Batch: MicroBatch;
    /// Three sizes of batches.
    const SIZES: [usize; 3];

    fn new(device: &Device) -> Self;
    fn batch(items: usize, device: &Device) -> Self::Batch;
    fn loss(&self, batch: Self::Batch) -> Tensor<1>;
}

const CLASSES: usize = 10;

/// Numbers with their classes.
#[derive(Clone, Debug, MicroBatch)]
pub struct Labelled<const D: usize> {
    inputs: Tensor<D>,
    targets: Tensor<1, Int>,
}

/// Pictures with what is to be made of them.
#[derive(Clone, Debug, MicroBatch)]
pub struct Paired {
    inputs: Tensor<4>,
    outputs: Tensor<4>,
}

/// Texts with the characters that come next, or with classes.
#[derive(Clone, Debug, MicroBatch)]
pub struct Texts<const D: usize> {
    tokens: Tensor<2, Int>,
    targets: Tensor<D, Int>,
}

fn numbers<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    let count = shape.iter().product();
    let values: Vec<f32> = (0..count).map(|at: usize| (at * 31 % 97) as f32 / 97.0).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

fn integers<const D: usize>(shape: [usize; D], below: usize, device: &Device) -> Tensor<D, Int> {
    let count = shape.iter().product();
    let values: Vec<i32> = (0..count).map(|at: usize| (at * 31 % below) as i32).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

fn labelled<const D: usize>(shape: [usize; D], device: &Device) -> Labelled<D> {
    Labelled { inputs: numbers(shape, device), targets: integers([shape[0]], CLASSES, device) }
}

fn cross_entropy(logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
    CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, targets)
}

fn conv(channels: [usize; 2], kernel: usize, stride: usize, device: &Device) -> Conv2d {
    let padding = kernel / 2;
    Conv2dConfig::new(channels, [kernel, kernel])
        .with_stride([stride, stride])
        .with_padding(PaddingConfig2d::Explicit(padding, padding, padding, padding))
        .init(device)
}

fn halving() -> MaxPool2d {
    MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init()
}

#[derive(Module, Debug)]
pub struct Mlp {
    first: Linear,
    second: Linear,
    output: Linear,
}

impl Zoo for Mlp {
    type Batch = Labelled<2>;
    const SIZES: [usize; 3] = [96, 1_000, 7_300];

    fn new(device: &Device) -> Self {
        Self {
            first: LinearConfig::new(256, 512).init(device),
            second: LinearConfig::new(512, 512).init(device),
            output: LinearConfig::new(512, CLASSES).init(device),
        }
    }

    fn batch(items: usize, device: &Device) -> Self::Batch {
        labelled([items, 256], device)
    }

    fn loss(&self, batch: Self::Batch) -> Tensor<1> {
        let x = gelu(self.first.forward(batch.inputs));
        cross_entropy(self.output.forward(gelu(self.second.forward(x))), batch.targets)
    }
}

/// A convolution with batch normalization.
#[derive(Module, Debug)]
struct Normed {
    conv: Conv2d,
    norm: BatchNorm,
}

impl Normed {
    fn new(channels: [usize; 2], kernel: usize, stride: usize, device: &Device) -> Self {
        let norm = BatchNormConfig::new(channels[1]).init(device);
        Self { conv: conv(channels, kernel, stride, device), norm }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        self.norm.forward(self.conv.forward(x))
    }
}

#[derive(Module, Debug)]
pub struct Cnn {
    blocks: Vec<Normed>,
    pool: MaxPool2d,
    dropout: Dropout,
    output: Linear,
}

impl Zoo for Cnn {
    type Batch = Labelled<4>;
    const SIZES: [usize; 3] = [13, 128, 1_100];

    fn new(device: &Device) -> Self {
        let channels = [[1, 16], [16, 32], [32, 64]];
        Self {
            blocks: channels.map(|channels| Normed::new(channels, 3, 1, device)).to_vec(),
            pool: halving(),
            dropout: DropoutConfig::new(0.25).init(),
            output: LinearConfig::new(64 * 9, CLASSES).init(device),
        }
    }

    fn batch(items: usize, device: &Device) -> Self::Batch {
        labelled([items, 1, 28, 28], device)
    }

    fn loss(&self, batch: Self::Batch) -> Tensor<1> {
        let through = |x, block: &Normed| self.pool.forward(relu(block.forward(x)));
        let x = self.blocks.iter().fold(batch.inputs, through);
        let x = self.dropout.forward(x.flatten::<2>(1, 3));
        cross_entropy(self.output.forward(x), batch.targets)
    }
}

/// Two convolutions with a shortcut around them.
#[derive(Module, Debug)]
struct Block {
    first: Normed,
    second: Normed,
    shortcut: Option<Normed>,
}

impl Block {
    fn new(from: usize, to: usize, device: &Device) -> Self {
        let stride = to / from;
        Self {
            first: Normed::new([from, to], 3, stride, device),
            second: Normed::new([to, to], 3, 1, device),
            shortcut: (stride != 1).then(|| Normed::new([from, to], 1, stride, device)),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let around = match &self.shortcut {
            Some(shortcut) => shortcut.forward(x.clone()),
            None => x.clone(),
        };
        relu(self.second.forward(relu(self.first.forward(x))) + around)
    }
}

/// ResNet-18 (He et al., 2016) with an eighth of its channels.
#[derive(Module, Debug)]
pub struct ResNet {
    stem: Normed,
    pool: MaxPool2d,
    blocks: Vec<Block>,
    average: AdaptiveAvgPool2d,
    output: Linear,
}

impl Zoo for ResNet {
    type Batch = Labelled<4>;
    const SIZES: [usize; 3] = [5, 40, 330];

    fn new(device: &Device) -> Self {
        let channels = [8, 8, 8, 16, 16, 32, 32, 64, 64];
        Self {
            stem: Normed::new([3, 8], 7, 2, device),
            pool: halving(),
            blocks: channels.windows(2).map(|it| Block::new(it[0], it[1], device)).collect(),
            average: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            output: LinearConfig::new(64, CLASSES).init(device),
        }
    }

    fn batch(items: usize, device: &Device) -> Self::Batch {
        labelled([items, 3, 64, 64], device)
    }

    fn loss(&self, batch: Self::Batch) -> Tensor<1> {
        let x = self.pool.forward(relu(self.stem.forward(batch.inputs)));
        let x = self.blocks.iter().fold(x, |x, block| block.forward(x));
        let x = self.average.forward(x).flatten::<2>(1, 3);
        cross_entropy(self.output.forward(x), batch.targets)
    }
}

/// A U-Net (Ronneberger et al., 2015) with two levels.
#[derive(Module, Debug)]
pub struct UNet {
    down: Conv2d,
    bottom: Conv2d,
    rise: ConvTranspose2d,
    up: Conv2d,
    output: Conv2d,
    pool: MaxPool2d,
}

impl Zoo for UNet {
    type Batch = Paired;
    const SIZES: [usize; 3] = [7, 60, 420];

    fn new(device: &Device) -> Self {
        let rise = ConvTranspose2dConfig::new([16, 8], [2, 2]).with_stride([2, 2]);
        Self {
            down: conv([1, 8], 3, 1, device),
            bottom: conv([8, 16], 3, 1, device),
            rise: rise.init(device),
            up: conv([16, 8], 3, 1, device),
            output: conv([8, 1], 1, 1, device),
            pool: halving(),
        }
    }

    fn batch(items: usize, device: &Device) -> Self::Batch {
        let pictures = numbers([items, 1, 48, 48], device);
        Paired { outputs: pictures.clone() * 0.5, inputs: pictures }
    }

    fn loss(&self, batch: Self::Batch) -> Tensor<1> {
        let down = relu(self.down.forward(batch.inputs));
        let bottom = relu(self.bottom.forward(self.pool.forward(down.clone())));
        let x = Tensor::cat(vec![down, self.rise.forward(bottom)], 1);
        let made = sigmoid(self.output.forward(relu(self.up.forward(x))));
        (made - batch.outputs).square().mean()
    }
}

const CHARACTERS: usize = 96;
const WIDTH: usize = 64;

#[derive(Module, Debug)]
pub struct Encoder {
    tokens: Embedding,
    layers: TransformerEncoder,
    output: Linear,
}

impl Zoo for Encoder {
    type Batch = Texts<1>;
    const SIZES: [usize; 3] = [6, 50, 410];

    fn new(device: &Device) -> Self {
        Self {
            tokens: EmbeddingConfig::new(CHARACTERS, WIDTH).init(device),
            layers: TransformerEncoderConfig::new(WIDTH, 4 * WIDTH, 4, 2).init(device),
            output: LinearConfig::new(WIDTH, CLASSES).init(device),
        }
    }

    fn batch(items: usize, device: &Device) -> Self::Batch {
        let targets = integers([items], CLASSES, device);
        Texts { tokens: integers([items, 40], CHARACTERS, device), targets }
    }

    fn loss(&self, batch: Self::Batch) -> Tensor<1> {
        let x = self.tokens.forward(batch.tokens);
        let x = self.layers.forward(TransformerEncoderInput::new(x));
        let x = x.mean_dim(1).squeeze_dim::<2>(1);
        cross_entropy(self.output.forward(x), batch.targets)
    }
}

#[derive(Module, Debug)]
pub struct Gpt {
    tokens: Embedding,
    positions: Embedding,
    layers: TransformerEncoder,
    norm: LayerNorm,
    head: Linear,
}

impl Zoo for Gpt {
    type Batch = Texts<2>;
    const SIZES: [usize; 3] = [4, 36, 290];

    fn new(device: &Device) -> Self {
        let layers = TransformerEncoderConfig::new(WIDTH, 4 * WIDTH, 4, 2).with_norm_first(true);
        Self {
            tokens: EmbeddingConfig::new(CHARACTERS, WIDTH).init(device),
            positions: EmbeddingConfig::new(64, WIDTH).init(device),
            layers: layers.init(device),
            norm: LayerNormConfig::new(WIDTH).init(device),
            head: LinearConfig::new(WIDTH, CHARACTERS).with_bias(false).init(device),
        }
    }

    fn batch(items: usize, device: &Device) -> Self::Batch {
        let [tokens, targets] = [(); 2].map(|()| integers([items, 64], CHARACTERS, device));
        Texts { tokens, targets }
    }

    fn loss(&self, batch: Self::Batch) -> Tensor<1> {
        let [items, length] = batch.tokens.dims();
        let device = batch.tokens.device();
        let positions = Tensor::arange(0..length as i64, &device).unsqueeze::<2>();
        let x = self.tokens.forward(batch.tokens) + self.positions.forward(positions);
        let mask = generate_autoregressive_mask(items, length, &device);
        let x = self.layers.forward(TransformerEncoderInput::new(x).mask_attn(mask));
        let logits = self.head.forward(self.norm.forward(x));
        cross_entropy(logits.flatten(0, 1), batch.targets.flatten(0, 1))
    }
}

#[derive(Module, Debug)]
pub struct Recurrent {
    lstm: Lstm,
    output: Linear,
}

impl Zoo for Recurrent {
    type Batch = Labelled<3>;
    const SIZES: [usize; 3] = [30, 250, 2_100];

    fn new(device: &Device) -> Self {
        Self {
            lstm: LstmConfig::new(16, 64, true).init(device),
            output: LinearConfig::new(12 * 64, CLASSES).init(device),
        }
    }

    fn batch(items: usize, device: &Device) -> Self::Batch {
        labelled([items, 12, 16], device)
    }

    fn loss(&self, batch: Self::Batch) -> Tensor<1> {
        let (states, _) = self.lstm.forward(batch.inputs, None);
        cross_entropy(self.output.forward(states.flatten(1, 2)), batch.targets)
    }
}
