//! Tests every activation, loss, layer and optimizer that the suite promises, with gradients.

use burn::backend::Flex;
use burn::module::{AutodiffModule, Module, ModuleVisitor, Param};
use burn::nn::attention::{MhaInput, MultiHeadAttentionConfig};
use burn::nn::loss::{
    BinaryCrossEntropyLossConfig, CTCLossConfig, CrossEntropyLossConfig, HuberLossConfig, MseLoss,
    PoissonNllLossConfig, Reduction,
};
use burn::nn::transformer::{TransformerEncoderConfig, TransformerEncoderInput};
use burn::nn::{BatchNormConfig, DropoutConfig, LinearConfig, PReluConfig, SwiGluConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, AdamWConfig, GradientsParams, Optimizer, SgdConfig};
use burn::prelude::*;
use burn::tensor::Distribution;
use burn::tensor::activation::*;
use burn::tensor::backend::AutodiffBackend;
use firebox_testing::layers::Layer;

use crate::{Again, Keep, LazyFlex, Outputs, check};

fn random<B: Backend, const D: usize>(shape: [usize; D], device: &B::Device) -> Tensor<B, D> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), device)
}

fn flat<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Tensor<B, 1> {
    let elements = tensor.shape().num_elements();
    tensor.reshape([elements])
}

/// Collects the gradients of a module in the order of its fields.
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

/// Computes the output, the gradient of the input and those of the module's parameters.
///
/// The loss weighs every output differently.
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

fn layers<B: AutodiffBackend>(device: &B::Device) -> Outputs<B> {
    let mut all = Vec::new();
    for layer in Layer::<B>::all(device) {
        let input = random([2, layer.features()], device);
        let outputs = through(&layer, input, |layer, x| layer.forward(x));
        all.extend(outputs.into_iter().map(|(_, tensor)| (layer.name(), tensor)));
    }
    all
}

#[test]
fn every_layer() {
    check!(layers);
}

fn coupled<B: AutodiffBackend>(device: &B::Device) -> Outputs<B> {
    let mut all = Vec::new();
    let norm = BatchNormConfig::new(3).init(device);
    for _ in 0..2 {
        all.extend(through(&norm, random([4, 3, 5, 2], device), |m, x| m.forward(x)));
    }
    let inference = norm.valid();
    let unseen = random::<B::InnerBackend, 4>([4, 3, 5, 2], device);
    all.push(("inference", Tensor::from_inner(flat(inference.forward(unseen)))));
    let none = Vec::<Param<Tensor<B, 1>>>::new();
    let dropout = DropoutConfig::new(0.4).init();
    all.extend(through(&none, random([4, 6], device), |_, x| dropout.forward(x)));
    all
}

#[test]
fn batch_normalization_and_dropout() {
    check!(coupled);
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
fn transformers_with_dropout() {
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

fn of_size<B: AutodiffBackend>(items: usize, device: &B::Device) -> Outputs<B> {
    let linear = LinearConfig::new(6, 5).init(device);
    through(&linear, random([items, 6], device), |m, x| relu(m.forward(x)))
}

fn one<B: AutodiffBackend>(device: &B::Device) -> Outputs<B> {
    of_size(1, device)
}

#[test]
fn a_batch_of_one() {
    check!(one);
}

fn nothing<B: AutodiffBackend>(device: &B::Device) -> Outputs<B> {
    of_size(0, device)
}

#[test]
fn a_batch_of_nothing() {
    // Not on NdArray, which divides by zero when it multiplies empty matrices.
    check!(nothing, Keep<Flex>, Keep<LazyFlex>);
    check!(nothing, Again<Flex>, Again<LazyFlex>);
}
