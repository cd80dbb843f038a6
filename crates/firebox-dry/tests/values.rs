//! The host computes the same values for a recorded step as the backend.

use std::time::{Duration, Instant};

use burn::backend::{Autodiff, Flex};
use burn::module::Module;
use burn::nn::attention::{
    MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, generate_autoregressive_mask,
};
use burn::nn::conv::{Conv1d, Conv1dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{
    Dropout, DropoutConfig, Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear,
    LinearConfig,
};
use burn::tensor::{Int, Tensor, TensorData, TensorPrimitive};
use firebox_dry::{NotComputed, compute_values};
use firebox_lazy::{Lazy, LazyBackend, Recording, StepRecorder, index_in_trace};
use firebox_trace::TensorIndex;

type Inner = Lazy<Flex>;
type B = Autodiff<Inner>;

/// A block with parts that a replay for memory alone need not get right: infinite scalars, draws,
/// masks, indices, host data.
#[derive(Module, Debug)]
struct Block<B: burn::tensor::backend::Backend> {
    embedding: Embedding<B>,
    attention: MultiHeadAttention<B>,
    norm: LayerNorm<B>,
    conv: Conv1d<B>,
    dropout: Dropout,
    output: Linear<B>,
}

impl Block<B> {
    fn new() -> Self {
        let device = Default::default();
        Self {
            embedding: EmbeddingConfig::new(11, 8).init(&device),
            attention: MultiHeadAttentionConfig::new(8, 2).with_dropout(0.2).init(&device),
            norm: LayerNormConfig::new(8).init(&device),
            conv: Conv1dConfig::new(8, 8, 3).init(&device),
            dropout: DropoutConfig::new(0.3).init(),
            output: LinearConfig::new(8, 11).init(&device),
        }
    }

    fn loss(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 1> {
        let device = tokens.device();
        let [batch, length] = tokens.dims();
        let x = self.embedding.forward(tokens.clone());
        let positions: Vec<f32> = (0..length * 8).map(|at| (at as f32 * 0.37).sin()).collect();
        let positions =
            Tensor::<B, 3>::from_data(TensorData::new(positions, [1, length, 8]), &device);
        let mask = generate_autoregressive_mask::<B>(batch, length, &device);
        let input = MhaInput::self_attn(self.norm.forward(x.clone() + positions)).mask_attn(mask);
        let x = x + self.attention.forward(input).context;
        let x = self.dropout.forward(self.conv.forward(x.swap_dims(1, 2)).swap_dims(1, 2));
        let length = x.dims()[1];
        let output = self.output.forward(x.mul_scalar(0.7)).reshape([batch * length, 11]);
        let targets = tokens.slice([0..batch, 0..length]).reshape([batch * length]);
        CrossEntropyLossConfig::new()
            .with_pad_tokens(Some(vec![0]))
            .init(&device)
            .forward(output, targets)
    }
}

type Results = Vec<Tensor<Inner, 1>>;

/// Records a step. Returns its loss and gradients, and their places in the trace.
fn record(block: &Block<B>) -> Recording<Flex, (Results, Vec<TensorIndex>)> {
    let tokens = Tensor::from_data([[1, 4, 0, 7, 10, 2], [3, 3, 9, 0, 1, 5]], &Default::default());
    let recorder = StepRecorder::new().fixed_draws().keep_uploads();
    let recorded = recorder.record::<Flex, _>(|| {
        let loss = block.loss(tokens);
        let mut grads = loss.clone().backward();
        let mut results = vec![loss.inner()];
        let mut add = |grad: Option<Tensor<Inner, 1>>| results.extend(grad);
        add(block.embedding.weight.val().grad_remove(&mut grads).map(FlattenAll::flatten_all));
        add(block
            .attention
            .query
            .weight
            .val()
            .grad_remove(&mut grads)
            .map(FlattenAll::flatten_all));
        add(block.norm.gamma.val().grad_remove(&mut grads));
        add(block.conv.weight.val().grad_remove(&mut grads).map(FlattenAll::flatten_all));
        add(block.output.weight.val().grad_remove(&mut grads).map(FlattenAll::flatten_all));
        let places = results.iter().map(place).collect();
        (results, places)
    });
    recorded.expect("nothing else records")
}

trait FlattenAll {
    fn flatten_all(self) -> Tensor<Inner, 1>;
}

impl<const D: usize> FlattenAll for Tensor<Inner, D> {
    fn flatten_all(self) -> Tensor<Inner, 1> {
        let elements = self.shape().num_elements();
        self.reshape([elements])
    }
}

fn place(tensor: &Tensor<Inner, 1>) -> TensorIndex {
    let TensorPrimitive::Float(tensor) = tensor.clone().into_primitive() else {
        panic!("nothing is quantized");
    };
    index_in_trace(&<Inner as LazyBackend>::lazy_float(&tensor)).expect("it is being recorded")
}

fn compute(
    recording: &Recording<Flex, (Results, Vec<TensorIndex>)>,
    deadline: Instant,
) -> Result<Vec<TensorData>, NotComputed> {
    let mut value = |tensor| recording.value_of(tensor);
    let (trace, wanted) = (recording.trace(), &recording.result().1);
    compute_values(trace, wanted, &[], &mut value, deadline)
}

#[test]
fn the_host_computes_what_the_backend_does() {
    let block = Block::new();
    // Initialized during the recording, all weights would be drawn alike.
    firebox_lazy::initialize(&block);
    let recording = record(&block);
    let found = compute(&recording, Instant::now() + Duration::from_secs(60)).expect("it can");
    let (results, _) = recording.run();
    assert_eq!(results.len(), 6);
    for (found, expected) in found.iter().zip(results) {
        let expected: Vec<f32> = expected.into_data().to_vec().expect("floats");
        let found: Vec<f32> = found.to_vec().expect("floats");
        assert!(expected.iter().any(|value| *value != 0.0));
        assert_eq!(found, expected);
    }
}

#[test]
fn what_takes_too_long_is_given_up() {
    let recording = record(&Block::new());
    assert_eq!(compute(&recording, Instant::now()), Err(NotComputed::TooLong));
}
