//! Steps that compute tensors again end with the same bits: parameters, running statistics and
//! optimizer state of the zoo's models, after three iterations within less and less memory.

#![cfg(feature = "flex")]

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::{Autodiff, Flex};
use burn::module::{AutodiffModule, Module};
use burn::optim::{AdamConfig, Optimizer};
use burn::record::{BinBytesRecorder, FullPrecisionSettings, Record, Recorder as _};
use burn::tensor::backend::Backend;
use burn::tensor::{BoolStore, DType, TensorData};
use burn::train::TrainStep;
use firebox::trace::{Heap, MemoryModel, StepRecorder, TensorIndex, Trace};
use firebox::{Bytes, Lazy, initialize};
use firebox_recompute::{Demand, Program, Rates, Selected, StepOrigin, select};
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
    train_given::<M>(initial, rewrite, &|_| Vec::new())
}

/// The same where these tensors of a recorded step are given other numbers.
fn train_given<M>(
    initial: &[u8],
    rewrite: &dyn Fn(&Trace) -> Option<Arc<Program>>,
    given: &dyn Fn(&Trace) -> Vec<TensorIndex>,
) -> serde_json::Value
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
        let recording = StepRecorder::new().record::<Flex, _>(|| model.step(batch).grads);
        let mut recording = recording.expect("nothing else is recorded here");
        if let Some(program) = rewrite(recording.trace()) {
            assert!(recording.rewrite(&program, || ()), "the program is that of the recording");
        }
        for tensor in given(recording.trace()) {
            let shape = recording.trace().tensor(tensor).shape.clone();
            let number = |at: usize| ((at * 7919 + tensor.0 as usize) % 101) as f32 / 50.0 - 1.0;
            let numbers: Vec<f32> = (0..shape.num_elements()).map(number).collect();
            assert!(recording.give(tensor, TensorData::new(numbers, shape)), "a step makes it");
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

/// Some of the tensors that a recipe computes again.
fn computed_again(trace: &Trace) -> Vec<TensorIndex> {
    let selected = within(trace, 0.0).expect("there is a recipe");
    let program = Program::new(trace, &selected.recipe).expect("it passes the checker");
    let made = program.origins().iter().filter_map(|origin| match origin {
        StepOrigin::Repeated(of) => trace.steps[of.0 as usize].outputs().first().copied(),
        _ => None,
    });
    let mut made: Vec<TensorIndex> =
        made.filter(|tensor| trace.tensor(*tensor).dtype.is_float()).collect();
    made.sort_unstable();
    made.dedup();
    made.into_iter().step_by(5).collect()
}

#[test]
fn what_is_given_to_a_step_is_given_again() {
    type M = zoo::Gpt<B>;

    let _alone = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
    let model = M::new(&Default::default());
    initialize(&model);
    let initial = Bytewise::new().record(model.into_record(), ()).expect("it is recorded");
    let as_recorded = train_given::<M>(&initial, &|_| None, &computed_again);
    assert!(train::<M>(&initial, &|_| None) != as_recorded, "what is given counts");
    for share in SHARES {
        let rewrite = |trace: &Trace| {
            let selected = within(trace, share)?;
            Some(Arc::new(Program::new(trace, &selected.recipe).expect("it passes the checker")))
        };
        let rewritten = train_given::<M>(&initial, &rewrite, &computed_again);
        assert!(rewritten == as_recorded, "within {share} it has other bits");
    }
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
