//! Steps that compute tensors again end with the same bits: parameters, running statistics and
//! optimizer state of the zoo's models, after three iterations within less and less memory.

#![cfg(feature = "flex")]

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::{Autodiff, Flex};
use burn::module::{AutodiffModule, Module, ModuleVisitor, Param};
use burn::optim::{AdamConfig, GradientsParams, Optimizer};
use burn::record::{BinBytesRecorder, FullPrecisionSettings, Record, Recorder as _};
use burn::tensor::backend::Backend;
use burn::tensor::{BoolStore, DType, Distribution, Tensor, TensorData};
use burn::train::TrainStep;
use firebox::{Bytes, Heap, Lazy, MemoryModel, RecordError, Recorder, Trace, initialize};
use firebox_recompute::{Demand, Program, Rates, Selected, select};
use firebox_testing::zoo::{self, Zoo};

type B = Autodiff<Lazy<Flex>>;
type Bytewise = BinBytesRecorder<FullPrecisionSettings>;

/// Flex has one generator for the whole process.
static GENERATOR: Mutex<()> = Mutex::new(());

const ITERATIONS: usize = 3;
const ITEMS: usize = 12;
const SHARES: [f64; 4] = [0.75, 0.5, 0.35, 0.0];

/// Trains for three iterations on the programs that `rewrite` makes of the recorded steps. Returns
/// all state at the end.
fn train<M>(initial: &[u8], rewrite: &dyn Fn(&Trace) -> Option<Arc<Program>>) -> serde_json::Value
where
    M: Zoo<B> + TrainStep<Input = <M as Zoo<B>>::Batch> + AutodiffModule<B>,
{
    let device = Default::default();
    <Flex as Backend>::seed(&device, 7);
    // A clone would share the running statistics.
    let record = Bytewise::new().load(initial.to_vec(), &device).expect("it was recorded here");
    let mut model = M::new(&device).load_record(record);
    let mut optimizer = AdamConfig::new().init::<B, M>();
    for iteration in 0..ITERATIONS {
        let items: Vec<usize> = (iteration..iteration + ITEMS).collect();
        let batch = M::batch(&items, &device);
        let recording = Recorder::new().record::<Flex, _>(|| model.step(batch).grads);
        let mut recording = recording.expect("nothing else is recorded here");
        if let Some(program) = rewrite(recording.trace()) {
            assert!(recording.rewrite(&program, || ()), "the program is that of the recording");
        }
        model = optimizer.step(1e-3, model, recording.run());
    }
    let model = serde_json::to_value(model.into_record().into_item::<FullPrecisionSettings>());
    let state = optimizer.to_record().into_item::<FullPrecisionSettings>();
    serde_json::json!([model.expect("a record"), state])
}

fn existing(trace: &Trace) -> Bytes {
    trace.existing().map(|tensor| trace.tensor(tensor).bytes()).sum()
}

/// The recipe for a share of a step's activations. At zero, that for the least that is feasible.
fn within(trace: &Trace, share: f64) -> Option<Selected> {
    let bools = DType::Bool(BoolStore::Native);
    let demand = Demand::new(trace, &Rates::RTX_4090).with_bools(bools);
    let unlimited = select(trace, Bytes::MAX, &demand).expect("nothing is repeated");
    let existing = existing(trace);
    let part = |share| existing + (unlimited.peak - existing).scale(share);
    // A choice that comes close is a choice.
    if share > 0.0 {
        return select(trace, part(share), &demand);
    }
    let within = |share| {
        let limit = part(share);
        select(trace, limit, &demand).filter(|selected| selected.peak <= limit)
    };
    // The least that is feasible.
    let (mut low, mut high, mut best) = (0.0, 1.0, None);
    for _ in 0..6 {
        let middle = (low + high) / 2.0;
        match within(middle) {
            Some(selected) => (high, best) = (middle, Some(selected)),
            None => low = middle,
        }
    }
    best
}

/// How many calls of a step are repeated at each share, and how many masks are packed at most.
/// Verifies that the results are the same.
fn same_bits<M>() -> (Vec<usize>, usize)
where
    M: Zoo<B> + TrainStep<Input = <M as Zoo<B>>::Batch> + AutodiffModule<B>,
{
    let _alone = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
    let model = M::new(&Default::default());
    initialize(&model);
    let initial = Bytewise::new().record(model.into_record(), ()).expect("it is recorded");
    let as_recorded = train::<M>(&initial, &|_| None);
    assert!(train::<M>(&initial, &|_| None) == as_recorded, "{} is repeatable", M::NAME);
    let masks = AtomicUsize::new(0);
    let repeats = SHARES.into_iter().map(|share| {
        let most = Mutex::new(0);
        let rewritten = train::<M>(&initial, &|trace| {
            let selected = within(trace, share)?;
            let program = Program::new(trace, &selected.recipe).expect("it passes the checker");
            let heap = Heap::flex();
            let before = heap.footprint(trace).peak;
            let after = heap.footprint(program.trace()).peak;
            let packed = program.packed();
            println!(
                "{}: {share} of the activations, {} of {} calls again, {packed} masks packed, heap {after} \
                 of {before}",
                M::NAME,
                program.repeats(),
                trace.calls().count(),
            );
            masks.fetch_max(packed, Relaxed);
            let mut most = most.lock().expect("nothing panics in between");
            *most = program.repeats().max(*most);
            Some(Arc::new(program))
        });
        assert!(rewritten == as_recorded, "{} within {share} has other bits", M::NAME);
        most.into_inner().expect("nothing panics in between")
    });
    (repeats.collect(), masks.into_inner())
}

macro_rules! models {
    ($($test:ident: $model:ident, $masks:expr;)*) => {$(
        #[test]
        fn $test() {
            let (repeats, masks) = same_bits::<zoo::$model<B>>();
            assert_eq!(masks > 0, $masks, "{masks} masks are packed");
            assert!(repeats.iter().any(|repeats| *repeats > 0), "{repeats:?} calls were repeated");
        }
    )*};
}

models! {
    mlp: Mlp, true;
    cnn: Cnn, false;
    resnet: ResNet, false;
    unet: UNet, false;
    encoder: Encoder, true;
    gpt: Gpt, true;
    lstm: Recurrent, false;
    autoencoder: Autoencoder, false;
    siamese: Siamese, false;
}

/// What a program computes whose reads are rewritten by the recipe for a share of activations of
/// the program that reads zeros. Also returns how many calls are repeated. None if there is none.
fn read_within<T>(share: f64, program: impl Fn() -> T) -> Option<(T, usize)> {
    let guess = Recorder::new().guess_reads().record::<Flex, _>(&program);
    let guess = guess.expect("zeros lead somewhere");
    let selected = within(guess.trace(), share)?;
    drop(guess);
    let recipe = Arc::new(selected.recipe);
    let recorder = Recorder::new().rewrite_at_reads(move |_| Some(recipe.clone()), || ());
    let recording = recorder.record::<Flex, _>(&program).expect("nothing else is recorded here");
    let begun = recording.begun_program().expect("it is rewritten").expect("it has a program");
    println!("{share} of the activations: {} calls again", begun.repeats());
    Some((recording.run(), begun.repeats()))
}

#[test]
fn a_step_that_reads_has_the_same_bits() {
    let _alone = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
    let device = Default::default();
    let model = zoo::Reader::<B>::new(&device);
    initialize(&model);
    let items: Vec<usize> = (0..40).collect();
    let gradients = |grads: &GradientsParams| -> Vec<TensorData> {
        let mut all = Vec::new();
        model.visit(&mut Gradients { grads, all: &mut all });
        all
    };
    let step = || TrainStep::step(&model, zoo::Reader::<B>::batch(&items, &device)).grads;
    let as_recorded = gradients(&step());
    assert_eq!(as_recorded.len(), 6);
    let mut most = 0;
    for share in [0.9, 0.75, 0.5] {
        let Some((grads, repeats)) = read_within(share, step) else { continue };
        assert!(gradients(&grads) == as_recorded, "within {share} there are other bits");
        most = repeats.max(most);
    }
    assert!(most > 0, "nothing is repeated");
}

struct Gradients<'a> {
    grads: &'a GradientsParams,
    all: &'a mut Vec<TensorData>,
}

impl ModuleVisitor<B> for Gradients<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let grad = self.grads.get::<Lazy<Flex>, D>(param.id);
        self.all.extend(grad.map(|grad| grad.into_data()));
    }
}

/// A program that does after its first read what zeros do not lead to. At the end, perhaps after
/// another read, it uses what was made before the first.
fn turns_off(input: &Tensor<B, 2>, weight: &Tensor<B, 2>, reads: usize) -> (f32, TensorData) {
    let first = input.clone().matmul(weight.clone()).tanh();
    let second = first.clone().exp() * first.clone();
    // There is no room for what is not needed here.
    let wide = Tensor::cat(vec![second.clone().inner(); 6], 0);
    let largest: f32 = wide.max().into_scalar();
    let third = match largest > 0.0 {
        true => (second.clone().sin() + first.clone().exp()).log() * second,
        false => second.clone().cos() * second,
    };
    let smallest = match reads {
        1 => -1.0,
        _ => third.clone().min().into_scalar(),
    };
    let last = match smallest < 0.0 {
        true => third.clone() * first + third,
        false => third.clone() + third,
    };
    let grads = last.sum().backward();
    let grad = weight.grad(&grads).expect("it has one").into_data();
    (largest + smallest, grad)
}

#[test]
fn a_program_that_turns_off_gets_back_what_was_dropped() {
    let _alone = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
    let device = Default::default();
    let input = Tensor::<B, 2>::random([64, 32], Distribution::Default, &device);
    let weight = Tensor::<B, 2>::random([32, 512], Distribution::Normal(0.0, 0.1), &device);
    let weight = weight.require_grad();
    for reads in [1, 2] {
        let program = || turns_off(&input, &weight, reads);
        let as_recorded = program();
        let mut most = 0;
        for share in [0.9, 0.85, 0.8, 0.75] {
            let Some((found, repeats)) = read_within(share, program) else { continue };
            assert!(found == as_recorded, "within {share} there are other bits");
            most = repeats.max(most);
        }
        assert!(most > 0, "nothing is repeated");
    }
}

#[test]
fn what_zeros_do_not_lead_to_is_an_error() {
    let x = Tensor::<Lazy<Flex>, 1>::from_floats([1.0, 2.0], &Default::default());
    let guess = |program: &dyn Fn()| {
        let recording = Recorder::new().guess_reads().record::<Flex, _>(program);
        recording.map(|_| ()).expect_err("zeros lead nowhere")
    };
    let panics = guess(&|| assert!(x.clone().max().into_scalar() > 0.0, "it is positive"));
    assert!(matches!(panics, RecordError::ReadUnknown { .. }), "{panics:?}");
    let waits = guess(&|| while x.clone().max().into_scalar() < 1.0 {});
    assert!(matches!(waits, RecordError::ReadUnknown { .. }), "{waits:?}");
    let positions = guess(&|| drop(x.clone().greater_elem(1.0).nonzero()));
    assert!(matches!(positions, RecordError::ReadUnknown { .. }), "{positions:?}");
}
