//! Every activation, loss, layer and optimizer that the suite promises, with gradients.

use burn::module::{AutodiffModule, Module, ModuleVisitor, Param};
use burn::nn::attention::{MhaInput, MultiHeadAttentionConfig};
use burn::nn::conv::{
    Conv1dConfig, Conv2dConfig, Conv3dConfig, ConvTranspose1dConfig, ConvTranspose2dConfig,
    ConvTranspose3dConfig,
};
use burn::nn::gru::GruConfig;
use burn::nn::loss::{
    BinaryCrossEntropyLossConfig, CTCLossConfig, CrossEntropyLossConfig, HuberLossConfig, MseLoss,
    PoissonNllLossConfig, Reduction,
};
use burn::nn::pool::{
    AdaptiveAvgPool1dConfig, AdaptiveAvgPool2dConfig, AvgPool1dConfig, AvgPool2dConfig,
    MaxPool1dConfig, MaxPool2dConfig,
};
use burn::nn::transformer::{TransformerEncoderConfig, TransformerEncoderInput};
use burn::nn::{
    BatchNormConfig, DropoutConfig, EmbeddingConfig, GroupNormConfig, LayerNormConfig,
    LinearConfig, LstmConfig, PReluConfig, SwiGluConfig,
};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, AdamWConfig, GradientsParams, Optimizer, SgdConfig};
use burn::prelude::*;
use burn::tensor::Distribution;
use burn::tensor::activation::*;
use burn::tensor::backend::AutodiffBackend;

use crate::{Outputs, check};

fn random<B: Backend, const D: usize>(shape: [usize; D], device: &B::Device) -> Tensor<B, D> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), device)
}

fn flat<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Tensor<B, 1> {
    let elements = tensor.shape().num_elements();
    tensor.reshape([elements])
}

/// Gathers the gradients of a module in the order of its fields.
struct Gradients<'a, B: AutodiffBackend> {
    gradients: &'a B::Gradients,
    outputs: Outputs<B>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Gradients<'_, B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let Some(gradient) = param.val().grad(self.gradients) {
            self.outputs.push(("parameter gradient", Tensor::from_inner(flat(gradient))));
        }
    }
}

/// The output, the gradient of the input and those of the module's parameters, for a loss that weighs every output
/// differently.
fn through<B: AutodiffBackend, M: Module<B>, const D: usize, const E: usize>(
    module: &M,
    input: Tensor<B, D>,
    forward: impl FnOnce(&M, Tensor<B, D>) -> Tensor<B, E>,
) -> Outputs<B> {
    let input = input.require_grad();
    let output = flat(forward(module, input.clone()));
    let weights = Tensor::arange(0..output.dims()[0] as i64, &output.device()).float();
    let loss = (output.clone() * (weights * 0.37).sin()).sum();
    let gradients = loss.backward();
    let mut outputs = vec![("output", output)];
    if let Some(gradient) = input.grad(&gradients) {
        outputs.push(("input gradient", Tensor::from_inner(flat(gradient))));
    }
    let mut visitor = Gradients { gradients: &gradients, outputs };
    module.visit(&mut visitor);
    visitor.outputs
}

fn activations<B: AutodiffBackend>(device: &B::Device) -> Outputs<B> {
    let mut all = Vec::new();
    macro_rules! each {
        ($($activation:expr),* $(,)?) => {$(
            all.extend(through(&Vec::<Param<Tensor<B, 1>>>::new(), random([3, 8], device), |_, x| $activation(x)));
        )*};
    }
    each!(
        relu,
        gelu,
        sigmoid,
        log_sigmoid,
        silu,
        hard_swish,
        mish,
        tanh,
        selu,
        softsign,
        gelu_approximate,
        |x| softmax(x, 1),
        |x| softmin(x, 1),
        |x| log_softmax(x, 1),
        |x| quiet_softmax(x, 1),
        |x| softplus(x, 1.5),
        |x| leaky_relu(x, 0.1),
        |x| hard_sigmoid(x, 0.2, 0.5),
        |x| elu(x, 1.1),
        |x| celu(x, 1.2),
        |x| thresholded_relu(x, 0.3),
        |x| glu(x, 1),
        |x| hard_shrink(x, 0.4),
        |x| soft_shrink(x, 0.4),
    );
    let prelu = PReluConfig::new().init(device);
    all.extend(through(&prelu, random([3, 8], device), |m, x| m.forward(x)));
    let swiglu = SwiGluConfig::new(8, 4).init(device);
    all.extend(through(&swiglu, random([3, 8], device), |m, x| m.forward(x)));
    all
}

#[test]
fn every_activation() {
    check!(activations);
}

fn losses<B: AutodiffBackend>(device: &B::Device) -> Outputs<B> {
    let none = Vec::<Param<Tensor<B, 1>>>::new();
    let classes = || Tensor::<B, 1, Int>::from_ints([1, 0, 3, 2], device);
    let target = || random::<B, 2>([4, 5], device);
    let mut all = Vec::new();
    all.extend(through(&none, random([4, 5], device), |_, x| {
        CrossEntropyLossConfig::new().with_smoothing(Some(0.1)).init(device).forward(x, classes())
    }));
    all.extend(through(&none, random([4, 5], device), |_, x| {
        let weights = Some(vec![0.5, 1.0, 2.0, 0.1, 1.5]);
        CrossEntropyLossConfig::new().with_weights(weights).init(device).forward(x, classes())
    }));
    all.extend(through(&none, random([4], device), |_, x| {
        let labels = Tensor::<B, 1, Int>::from_ints([1, 0, 1, 0], device);
        BinaryCrossEntropyLossConfig::new().with_logits(true).init(device).forward(x, labels)
    }));
    all.extend(through(&none, random([4, 5], device), |_, x| {
        MseLoss::new().forward(x, target(), Reduction::Mean)
    }));
    all.extend(through(&none, random([4, 5], device), |_, x| {
        HuberLossConfig::new(0.7).init().forward(x, target(), Reduction::Sum)
    }));
    all.extend(through(&none, random([4, 5], device), |_, x| {
        PoissonNllLossConfig::new().init().forward(x, target().abs(), Reduction::Mean)
    }));
    all.extend(through(&none, random([6, 2, 5], device), |_, x| {
        let targets = Tensor::<B, 2, Int>::from_ints([[1, 2, 3], [2, 2, 4]], device);
        let inputs = Tensor::<B, 1, Int>::from_ints([6, 5], device);
        let lengths = Tensor::<B, 1, Int>::from_ints([3, 2], device);
        CTCLossConfig::new().init().forward(log_softmax(x, 2), targets, inputs, lengths)
    }));
    all
}

#[test]
fn every_loss() {
    check!(losses);
}

fn convolutions<B: AutodiffBackend>(device: &B::Device) -> Outputs<B> {
    let mut all = Vec::new();
    let conv = Conv1dConfig::new(3, 4, 3).with_stride(2).init(device);
    all.extend(through(&conv, random([2, 3, 9], device), |m, x| m.forward(x)));
    let conv = Conv2dConfig::new([4, 6], [3, 3]).with_groups(2).with_dilation([2, 1]).init(device);
    all.extend(through(&conv, random([2, 4, 8, 7], device), |m, x| m.forward(x)));
    let conv = Conv3dConfig::new([2, 3], [2, 3, 2]).init(device);
    all.extend(through(&conv, random([2, 2, 4, 5, 4], device), |m, x| m.forward(x)));
    let conv = ConvTranspose1dConfig::new([3, 4], 3).with_stride(2).init(device);
    all.extend(through(&conv, random([2, 3, 6], device), |m, x| m.forward(x)));
    let conv = ConvTranspose2dConfig::new([3, 4], [3, 2]).with_stride([2, 1]).init(device);
    all.extend(through(&conv, random([2, 3, 5, 4], device), |m, x| m.forward(x)));
    let conv = ConvTranspose3dConfig::new([2, 3], [2, 2, 2]).init(device);
    all.extend(through(&conv, random([2, 2, 3, 4, 3], device), |m, x| m.forward(x)));
    all
}

#[test]
fn every_convolution() {
    check!(convolutions);
}

fn pools<B: AutodiffBackend>(device: &B::Device) -> Outputs<B> {
    let none = Vec::<Param<Tensor<B, 1>>>::new();
    let mut all = Vec::new();
    let line = || random::<B, 3>([2, 3, 8], device);
    let plane = || random::<B, 4>([2, 3, 8, 6], device);
    all.extend(through(&none, line(), |_, x| MaxPool1dConfig::new(3).init().forward(x)));
    all.extend(through(&none, line(), |_, x| AvgPool1dConfig::new(3).init().forward(x)));
    all.extend(through(&none, line(), |_, x| AdaptiveAvgPool1dConfig::new(4).init().forward(x)));
    let pool = MaxPool2dConfig::new([2, 3]).with_strides([2, 2]).init();
    all.extend(through(&none, plane(), |_, x| pool.forward(x)));
    let pool = AvgPool2dConfig::new([3, 2]).with_strides([1, 2]).init();
    all.extend(through(&none, plane(), |_, x| pool.forward(x)));
    let pool = AdaptiveAvgPool2dConfig::new([4, 3]).init();
    all.extend(through(&none, plane(), |_, x| pool.forward(x)));
    all
}

#[test]
fn every_pool() {
    check!(pools);
}

fn norms<B: AutodiffBackend>(device: &B::Device) -> Outputs<B> {
    let mut all = Vec::new();
    let norm = BatchNormConfig::new(3).init(device);
    for _ in 0..2 {
        all.extend(through(&norm, random([4, 3, 5, 2], device), |m, x| m.forward(x)));
    }
    let inference = norm.valid();
    let unseen = random::<B::InnerBackend, 4>([4, 3, 5, 2], device);
    all.push(("inference", Tensor::from_inner(flat(inference.forward(unseen)))));
    let norm = LayerNormConfig::new(6).init(device);
    all.extend(through(&norm, random([4, 3, 6], device), |m, x| m.forward(x)));
    let norm = GroupNormConfig::new(2, 6).init(device);
    all.extend(through(&norm, random([4, 6, 3, 2], device), |m, x| m.forward(x)));
    all
}

#[test]
fn every_norm() {
    check!(norms);
}

fn layers<B: AutodiffBackend>(device: &B::Device) -> Outputs<B> {
    let mut all = Vec::new();
    let linear = LinearConfig::new(6, 5).init(device);
    all.extend(through(&linear, random([4, 6], device), |m, x| m.forward(x)));
    let embedding = EmbeddingConfig::new(9, 4).init(device);
    let words = Tensor::<B, 2, Int>::from_ints([[0, 3, 3], [8, 1, 0]], device);
    all.extend(through(&embedding, random([1], device), |m, _| m.forward(words)));
    let none = Vec::<Param<Tensor<B, 1>>>::new();
    let dropout = DropoutConfig::new(0.4).init();
    all.extend(through(&none, random([4, 6], device), |_, x| dropout.forward(x)));
    let lstm = LstmConfig::new(4, 5, true).init(device);
    all.extend(through(&lstm, random([2, 6, 4], device), |m, x| m.forward(x, None).0));
    let gru = GruConfig::new(4, 5, true).init(device);
    all.extend(through(&gru, random([2, 6, 4], device), |m, x| m.forward(x, None)));
    all
}

#[test]
fn every_layer() {
    check!(layers);
}

fn transformers<B: AutodiffBackend>(device: &B::Device) -> Outputs<B> {
    let mut all = Vec::new();
    let attention = MultiHeadAttentionConfig::new(8, 2).init(device);
    let pad = Tensor::<B, 2, Bool>::from_bool(
        TensorData::from([[false, false, true], [false, true, true]]),
        device,
    );
    all.extend(through(&attention, random([2, 3, 8], device), |m, x| {
        m.forward(MhaInput::self_attn(x).mask_pad(pad.clone())).context
    }));
    let encoder = TransformerEncoderConfig::new(8, 16, 2, 2).init(device);
    all.extend(through(&encoder, random([2, 3, 8], device), |m, x| {
        m.forward(TransformerEncoderInput::new(x).mask_pad(pad.clone()))
    }));
    all
}

#[test]
fn every_transformer() {
    check!(transformers);
}

fn optimized<B: AutodiffBackend, O: Optimizer<burn::nn::Linear<B>, B>>(
    mut optimizer: O,
    device: &B::Device,
) -> Outputs<B> {
    let mut linear = LinearConfig::new(4, 3).init(device);
    for _ in 0..3 {
        let loss = linear.forward(random([5, 4], device)).powf_scalar(2.0).mean();
        let gradients = GradientsParams::from_grads(loss.backward(), &linear);
        linear = optimizer.step(0.05, linear, gradients);
    }
    let bias = linear.bias.as_ref().map(|bias| flat(bias.val()));
    vec![("weight", flat(linear.weight.val())), ("bias", bias.expect("there is a bias"))]
}

fn optimizers<B: AutodiffBackend>(device: &B::Device) -> Outputs<B> {
    let mut all = optimized(AdamConfig::new().init(), device);
    all.extend(optimized(AdamWConfig::new().init(), device));
    let momentum = SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
    all.extend(optimized(momentum.init(), device));
    all
}

#[test]
fn every_optimizer() {
    check!(optimizers);
}

fn sizes<B: AutodiffBackend>(device: &B::Device) -> Outputs<B> {
    let mut all = Vec::new();
    let linear = LinearConfig::new(6, 5).init(device);
    for items in [0, 1] {
        all.extend(through(&linear, random([items, 6], device), |m, x| relu(m.forward(x))));
    }
    all
}

#[test]
fn a_batch_of_nothing_and_of_one() {
    check!(sizes);
}
