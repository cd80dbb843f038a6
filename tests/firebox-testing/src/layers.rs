//! The layers that the suites share. Each maps rows of numbers to rows of numbers.
//!
//! The equivalence suite runs them on a backend with and without the decorator. The Learner's suite
//! trains them whole and split. No layer couples the items of a batch or draws random numbers.

#![allow(clippy::large_enum_variant, reason = "one variant a layer, and a handful of values")]

use burn::nn::activation::{Activation, ActivationConfig};
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::conv::{
    Conv1d, Conv1dConfig, Conv2d, Conv2dConfig, Conv3d, Conv3dConfig, ConvTranspose1d,
    ConvTranspose1dConfig, ConvTranspose2d, ConvTranspose2dConfig, ConvTranspose3d,
    ConvTranspose3dConfig,
};
use burn::nn::gru::{Gru, GruConfig};
use burn::nn::pool::{
    AdaptiveAvgPool1d, AdaptiveAvgPool1dConfig, AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig,
    AvgPool1d, AvgPool1dConfig, AvgPool2d, AvgPool2dConfig, MaxPool1d, MaxPool1dConfig, MaxPool2d,
    MaxPool2dConfig,
};
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{
    Embedding, EmbeddingConfig, GroupNorm, GroupNormConfig, LayerNorm, LayerNormConfig, Linear,
    LinearConfig, Lstm, LstmConfig, PReluConfig, SwiGluConfig,
};
use burn::prelude::*;

/// Writes the enum of layers from a table: name, module, item shape, constructor, call.
macro_rules! layers {
    ($(
        $name:ident($module:ty) on [$($dim:literal),+]:
        |$device:ident| $init:expr, |$layer:ident, $input:ident| $forward:expr;
    )+) => {
        /// A layer of the suites.
        #[derive(Module, Debug)]
        pub enum Layer<B: Backend> {
            $(
                #[doc = concat!("`", stringify!($module), "`.")]
                $name($module),
            )+
        }

        impl<B: Backend> Layer<B> {
            /// Every layer, initialized.
            pub fn all(device: &B::Device) -> Vec<Self> {
                vec![$({
                    let $device = device;
                    Self::$name($init)
                }),+]
            }

            /// Name of the layer.
            pub fn name(&self) -> &'static str {
                match self {
                    $(Self::$name(_) => stringify!($name),)+
                }
            }

            /// Count of numbers in an item.
            pub fn features(&self) -> usize {
                match self {
                    $(Self::$name(_) => [$($dim),+].iter().product(),)+
                }
            }

            /// Output of a batch, one row per item.
            pub fn forward(&self, rows: Tensor<B, 2>) -> Tensor<B, 2> {
                let [items, _] = rows.dims();
                match self {
                    $(Self::$name($layer) => {
                        let $input = rows.reshape([items, $($dim),+]);
                        let output = $forward;
                        let numbers = output.shape().num_elements();
                        output.reshape([items, numbers / items])
                    })+
                }
            }
        }
    };
}

layers! {
    Linear(Linear<B>) on [6]:
        |device| LinearConfig::new(6, 5).init(device), |m, x| m.forward(x);
    Activations(Vec<Activation<B>>) on [8]:
        |device| activations(device), |m, x| {
            Tensor::cat(m.iter().map(|activation| activation.forward(x.clone())).collect(), 1)
        };
    Conv1d(Conv1d<B>) on [3, 9]:
        |device| Conv1dConfig::new(3, 4, 3).with_stride(2).init(device), |m, x| m.forward(x);
    Conv2d(Conv2d<B>) on [4, 8, 7]:
        |device| {
            let config = Conv2dConfig::new([4, 6], [3, 3]).with_groups(2).with_dilation([2, 1]);
            config.init(device)
        }, |m, x| m.forward(x);
    Conv3d(Conv3d<B>) on [2, 4, 5, 4]:
        |device| Conv3dConfig::new([2, 3], [2, 3, 2]).init(device), |m, x| m.forward(x);
    ConvTranspose1d(ConvTranspose1d<B>) on [3, 6]:
        |device| ConvTranspose1dConfig::new([3, 4], 3).with_stride(2).init(device),
        |m, x| m.forward(x);
    ConvTranspose2d(ConvTranspose2d<B>) on [3, 5, 4]:
        |device| ConvTranspose2dConfig::new([3, 4], [3, 2]).with_stride([2, 1]).init(device),
        |m, x| m.forward(x);
    ConvTranspose3d(ConvTranspose3d<B>) on [2, 3, 4, 3]:
        |device| ConvTranspose3dConfig::new([2, 3], [2, 2, 2]).init(device), |m, x| m.forward(x);
    MaxPool1d(MaxPool1d) on [3, 8]:
        |_d| MaxPool1dConfig::new(3).init(), |m, x| m.forward(x);
    AvgPool1d(AvgPool1d) on [3, 8]:
        |_d| AvgPool1dConfig::new(3).init(), |m, x| m.forward(x);
    AdaptiveAvgPool1d(AdaptiveAvgPool1d) on [3, 8]:
        |_d| AdaptiveAvgPool1dConfig::new(4).init(), |m, x| m.forward(x);
    MaxPool2d(MaxPool2d) on [3, 8, 6]:
        |_d| MaxPool2dConfig::new([2, 3]).with_strides([2, 2]).init(), |m, x| m.forward(x);
    AvgPool2d(AvgPool2d) on [3, 8, 6]:
        |_d| AvgPool2dConfig::new([3, 2]).with_strides([1, 2]).init(), |m, x| m.forward(x);
    AdaptiveAvgPool2d(AdaptiveAvgPool2d) on [3, 8, 6]:
        |_d| AdaptiveAvgPool2dConfig::new([4, 3]).init(), |m, x| m.forward(x);
    LayerNorm(LayerNorm<B>) on [3, 6]:
        |device| LayerNormConfig::new(6).init(device), |m, x| m.forward(x);
    GroupNorm(GroupNorm<B>) on [6, 3, 2]:
        |device| GroupNormConfig::new(2, 6).init(device), |m, x| m.forward(x);
    Embedding(Embedding<B>) on [3]:
        |device| EmbeddingConfig::new(9, 4).init(device),
        |m, x| m.forward((x * 4.0).abs().clamp(0.0, 8.0).int());
    Lstm(Lstm<B>) on [6, 4]:
        |device| LstmConfig::new(4, 5, true).init(device), |m, x| m.forward(x, None).0;
    Gru(Gru<B>) on [6, 4]:
        |device| GruConfig::new(4, 5, true).init(device), |m, x| m.forward(x, None);
    MultiHeadAttention(MultiHeadAttention<B>) on [3, 8]:
        |device| MultiHeadAttentionConfig::new(8, 2).with_dropout(0.0).init(device), |m, x| {
            let mask = padding(&x);
            m.forward(MhaInput::self_attn(x).mask_pad(mask)).context
        };
    TransformerEncoder(TransformerEncoder<B>) on [3, 8]:
        |device| TransformerEncoderConfig::new(8, 16, 2, 2).with_dropout(0.0).init(device),
        |m, x| {
            let mask = padding(&x);
            m.forward(TransformerEncoderInput::new(x).mask_pad(mask))
        };
}

/// The activations of burn-nn that are modules.
fn activations<B: Backend>(device: &B::Device) -> Vec<Activation<B>> {
    let configs = [
        ActivationConfig::Gelu,
        ActivationConfig::PRelu(PReluConfig::new()),
        ActivationConfig::Relu,
        ActivationConfig::SwiGlu(SwiGluConfig::new(8, 4)),
        ActivationConfig::Selu,
        ActivationConfig::Sigmoid,
        ActivationConfig::Tanh,
        ActivationConfig::HardSwish,
        ActivationConfig::Softsign,
    ];
    configs.iter().map(|config| config.init(device)).collect()
}

/// Marks the last of the three positions of every item as padding.
fn padding<B: Backend>(x: &Tensor<B, 3>) -> Tensor<B, 2, Bool> {
    let row = TensorData::from([[false, false, true]]);
    Tensor::<B, 2, Bool>::from_bool(row, &x.device()).expand([x.dims()[0], 3])
}
