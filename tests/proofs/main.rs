//! What proofs say about losses, models and random programs, against gradients that are computed:
//! of a batch, and of its parts. The checker shares no code with the analysis.
//!
//! Random programs: 200 fixed ones. Others run with
//! `PROOF_CASES=10000 PROOF_FROM=7 cargo test --workspace --release --test proofs -- --nocapture`.

mod losses;
mod random;

use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use burn::backend::{Autodiff, Flex};
use burn::module::{AutodiffModule, Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::prelude::*;
use burn::tensor::{DType, TensorPrimitive, set_default_dtypes};
use burn::train::TrainStep;
use firebox::{Lazy, MicroBatch};
use firebox_dry::compute_values;
use firebox_lazy::{LazyBackend, Recording, StepRecorder, label, mark};
use firebox_proof::{Adds, CUT, Given, HostData, Proof, prove};
use firebox_testing::zoo::{self, Zoo};
use firebox_trace::{Category, Label, TensorIndex, Trace};

use crate::losses::{Batch, LOSSES, Net};

type L = Lazy<Flex>;
type B = Autodiff<L>;

/// The items of the batch, and its parts.
const ITEMS: usize = 13;
const PARTS: [Range<usize>; 3] = [0..3, 3..5, 5..13];
/// A part of one item, too.
const SINGLE: [Range<usize>; 2] = [0..1, 1..13];

/// Gradients agree to so many digits: burn's autodiff divides by 32-bit reciprocals.
const TOLERANCE: f64 = 1e-7;

struct Labels<'a> {
    grads: &'a GradientsParams,
    path: Vec<String>,
}

impl ModuleVisitor<B> for Labels<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let named = |category| Label { category, name: self.path.join(".") };
        if let TensorPrimitive::Float(tensor) = param.val().into_primitive() {
            label(&B::lazy_float(&tensor), named(Category::Parameter));
        }
        let grad = self.grads.get::<L, D>(param.id).map(Tensor::into_primitive);
        if let Some(TensorPrimitive::Float(grad)) = grad {
            label(&L::lazy_float(&grad), named(Category::Gradient));
        }
    }

    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }
}

/// Gradients as numbers, in the order of the model.
struct Numbers<'a>(&'a GradientsParams, Vec<f64>);

impl ModuleVisitor<B> for Numbers<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        match self.0.get::<L, D>(param.id) {
            Some(grad) => self.1.extend(grad.into_data().iter::<f64>()),
            None => self.1.extend(vec![0.0; param.val().shape().num_elements()]),
        }
    }
}

fn recorded<M>(
    model: &M,
    batch: &<M as TrainStep>::Input,
    range: Range<usize>,
) -> Result<Recording<Flex, ()>, String>
where
    M: TrainStep<Input: MicroBatch> + AutodiffModule<B>,
{
    let recorder = StepRecorder::new().glance().with_values().keep_uploads();
    let snapshot = model.clone().into_record();
    let recording = catch_unwind(AssertUnwindSafe(|| {
        recorder.record::<Flex, _>(|| {
            let part = batch.range(range);
            mark::<Flex>(CUT);
            let grads = model.step(part).grads;
            model.visit(&mut Labels { grads: &grads, path: Vec::new() });
        })
    }));
    firebox_lazy::restore::<B, M>(model, snapshot).map_err(|error| error.to_string())?;
    let recording = recording.map_err(|_| "it panics".to_owned())?;
    recording.map_err(|error| error.to_string())
}

fn as_proof(recording: &Recording<Flex, ()>, items: usize) -> firebox_proof::Recording<'_> {
    let inputs = recording.inputs().into_iter().map(|input| (input.id, input.tensor));
    let (inputs, outputs) = (inputs.collect(), recording.held());
    firebox_proof::Recording { trace: recording.trace(), items, inputs, outputs }
}

/// The proofs of these parts of a batch of [`ITEMS`] items.
fn proofs<M>(model: &M, batch: &<M as TrainStep>::Input, parts: &[Range<usize>]) -> Vec<Proof>
where
    M: TrainStep<Input: MicroBatch> + AutodiffModule<B>,
{
    let undecided = |why| vec![Proof::Undecided(why)];
    let whole = match recorded(model, batch, 0..ITEMS) {
        Ok(whole) => whole,
        Err(why) => return undecided(why),
    };
    let mut proofs = Vec::new();
    for part in parts {
        let recording = match recorded(model, batch, part.clone()) {
            Ok(recording) => recording,
            Err(why) => return undecided(why),
        };
        let host = |a, b| match (whole.value_of(a), recording.value_of(b)) {
            (Some(a), Some(b)) if a.shape == b.shape => {
                if a == b {
                    HostData::Same
                } else {
                    HostData::Other
                }
            }
            (Some(a), Some(b)) => {
                let each = a.bytes.len() / ITEMS;
                let rows = &a.bytes[each * part.start..each * part.end];
                if rows == &b.bytes[..] { HostData::Rows } else { HostData::Other }
            }
            _ => HostData::Other,
        };
        let proof = prove(&as_proof(&whole, ITEMS), &as_proof(&recording, part.len()), &host);
        proofs.push(proof);
    }
    proofs
}

/// The proof that says least.
fn least(proofs: &[Proof]) -> &Proof {
    // What one part has to be given is nothing to another, which begins with the first item.
    let rank = |proof: &&Proof| match proof {
        Proof::Adds(_) => usize::from(said(proof).starts_with("given")),
        Proof::Mixed(_) => 2,
        Proof::Undecided(_) => 3,
    };
    // The first of several.
    proofs.iter().rev().max_by_key(rank).expect("there is a part")
}

/// A proof in a word.
fn said(proof: &Proof) -> &'static str {
    match proof {
        Proof::Adds(adds) => match (&adds.mean, &adds.sum, &adds.once) {
            (Some(given), _, _) if given.is_empty() => "mean",
            (_, Some(given), None) if given.is_empty() => "sum",
            (_, Some(given), Some(_)) if given.is_empty() => "sum and once",
            (Some(_), None, _) => "given, as a mean",
            (None, _, None) => "given, as a sum",
            (Some(_), Some(_), None) => "given",
            (_, _, Some(_)) => "given, and once",
        },
        Proof::Mixed(_) => "mixed",
        Proof::Undecided(_) => "undecided",
    }
}

/// The gradient of a part that is given what `given` says of the whole batch.
fn gradient<M>(
    model: &M,
    batch: &<M as TrainStep>::Input,
    range: Range<usize>,
    (given, once): (&[Given], &[[TensorIndex; 2]]),
) -> Option<Vec<f64>>
where
    M: TrainStep<Input: MicroBatch> + AutodiffModule<B>,
{
    let record = |range: Range<usize>| {
        let recorder = StepRecorder::new().keep_uploads();
        let recording = recorder.record::<Flex, _>(|| {
            let part = batch.range(range);
            mark::<Flex>(CUT);
            model.step(part).grads
        });
        recording.expect("nothing else records")
    };
    let grads = catch_unwind(AssertUnwindSafe(|| {
        let mut recording = record(range.clone());
        if !given.is_empty() {
            let whole = record(0..ITEMS);
            let wanted: Vec<_> = given.iter().map(|given| given.whole).collect();
            let value = &mut |tensor| whole.value_of(tensor);
            let later = Instant::now() + Duration::from_secs(60);
            let numbers = compute_values(whole.trace(), &wanted, &[], value, later);
            let numbers = numbers.expect("the host computes it");
            for (given, numbers) in given.iter().zip(&numbers) {
                let data = given.to_part(numbers, &range, ITEMS).expect("they are no integers");
                assert!(recording.give(given.part, data), "{given:?}");
            }
        }
        for [_, part] in once.iter().filter(|_| range.start > 0) {
            let of = recording.trace().tensor(*part).ty.clone();
            let zeros = TensorData::zeros::<f64, _>(of.shape.clone()).convert_dtype(of.dtype);
            assert!(recording.give(*part, zeros));
        }
        let grads = recording.run();
        let mut numbers = Numbers(&grads, Vec::new());
        model.visit(&mut numbers);
        numbers.1
    }));
    grads.ok().filter(|grads| grads.iter().all(|number| number.is_finite()))
}

/// How far sums and means of the parts, with what they are given, are from the gradient of the
/// batch. `None` if there is no gradient.
fn apart<M>(
    model: &M,
    batch: &<M as TrainStep>::Input,
    (parts, proofs): (&[Range<usize>], &[Proof]),
) -> Option<(f64, f64)>
where
    M: TrainStep<Input: MicroBatch> + AutodiffModule<B>,
{
    let whole = gradient(model, batch, 0..ITEMS, (&[], &[]))?;
    let mut largest = whole.iter().fold(0.0, |most: f64, number| most.max(number.abs()));
    let mut by = |given: fn(&Adds) -> &Option<Vec<Given>>, is_mean: bool| -> Option<f64> {
        let mut sum = vec![0.0; whole.len()];
        for (at, part) in parts.iter().enumerate() {
            let share = part.len() as f64 / ITEMS as f64;
            let (given, once) = match proofs.get(at) {
                Some(Proof::Adds(adds)) => {
                    let once = adds.once_in.clone().filter(|_| !is_mean).unwrap_or_default();
                    (given(adds).clone().unwrap_or_default(), once)
                }
                _ => (Vec::new(), Vec::new()),
            };
            let gradient = gradient(model, batch, part.clone(), (&given, &once))?;
            for (sum, number) in sum.iter_mut().zip(gradient) {
                *sum += if is_mean { share * number } else { number };
                largest = largest.max(number.abs() * share);
            }
        }
        Some(sum.iter().zip(&whole).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max))
    };
    let (sum, mean) = (by(|adds| &adds.sum, false)?, by(|adds| &adds.mean, true)?);
    // A smaller gradient is what rounding leaves of none.
    (largest > 1e-6).then(|| (sum / largest, mean / largest))
}

/// How far the mean of the gradients of batches, by the sum that each divides by, is from that of
/// all of them as one batch. `None` if they have no such sum, or a batch has no gradient.
fn apart_as_batches<M>(
    model: &M,
    batch: &<M as TrainStep>::Input,
    (parts, proofs): (&[Range<usize>], &[Proof]),
) -> Option<f64>
where
    M: TrainStep<Input: MicroBatch> + AutodiffModule<B>,
{
    let whole = gradient(model, batch, 0..ITEMS, (&[], &[]))?;
    let computed = |recording: &Recording<Flex, ()>, wanted: &[_], known: Option<(_, f64)>| {
        let later = Instant::now() + Duration::from_secs(60);
        let is_known: Vec<_> = known.iter().map(|(tensor, _)| *tensor).collect();
        let value = &mut |tensor| match known {
            Some((of, number)) if of == tensor => {
                let of = recording.trace().tensor(tensor);
                Some(TensorData::new(vec![number], of.shape.clone()).convert_dtype(of.dtype))
            }
            _ => recording.value_of(tensor),
        };
        let computed = compute_values(recording.trace(), wanted, &is_known, value, later);
        let numbers = |data: TensorData| data.iter::<f64>().collect::<Vec<f64>>();
        Some(computed.ok()?.into_iter().map(numbers).collect::<Vec<_>>())
    };
    let (mut sum, mut total) = (vec![0.0; whole.len()], 0.0);
    let of_all = recorded(model, batch, 0..ITEMS).ok()?;
    for (part, proof) in parts.iter().zip(proofs) {
        let Proof::Adds(Adds { counts: Some(counts), .. }) = proof else { return None };
        let (scales, powers): (Vec<_>, Vec<_>) = counts.scales.iter().copied().unzip();
        let twice = 2.0 * computed(&of_all, &counts.sum[..1], None)?[0][0];
        let numbers = computed(&of_all, &scales, None)?;
        let scaled = computed(&of_all, &scales, Some((counts.sum[0], twice)))?;
        let is_so = numbers.iter().zip(&scaled).zip(powers).all(|((numbers, scaled), power)| {
            let pairs = numbers.iter().zip(scaled);
            pairs.into_iter().all(|(a, b)| (a * 2f64.powi(power) - b).abs() <= 1e-6 * b.abs())
        });
        if !is_so {
            return None;
        }
        let recording = recorded(model, batch, part.clone()).ok()?;
        let weight = computed(&recording, &counts.sum[1..], None)?[0][0];
        total += weight;
        for (sum, number) in sum.iter_mut().zip(gradient(model, batch, part.clone(), (&[], &[]))?) {
            *sum += weight * number;
        }
    }
    let largest = whole.iter().fold(0.0, |most: f64, number| most.max(number.abs()));
    let apart = sum.iter().zip(&whole).map(|(a, b)| (a / total - b).abs()).fold(0.0, f64::max);
    // A smaller gradient is what rounding leaves of none.
    (largest > 1e-6).then_some(apart / largest)
}

/// A model and a batch in 64 bits.
fn wide<M: Module<B>>(model: M) -> M {
    struct Wide;

    impl burn::module::ModuleMapper<B> for Wide {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
            let is_trained = param.is_require_grad();
            param.map(|tensor| {
                tensor.detach().cast(DType::F64).detach().set_require_grad(is_trained)
            })
        }
    }

    model.map(&mut Wide)
}

/// What became of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum End {
    Proved,
    Given,
    Once,
    Mixed,
    /// Gradients of the parts add up, and it was not seen.
    FalselyMixed,
    Undecided,
    Nothing,
}

/// Compares proofs with gradients.
#[track_caller]
fn judged(name: &str, proofs: &[Proof], apart: Option<(f64, f64)>) -> End {
    let proof = least(proofs);
    let Some((sum, mean)) = apart else { return End::Nothing };
    let said = said(proof);
    let Proof::Adds(adds) = proof else {
        return match said {
            "mixed" if sum < TOLERANCE || mean < TOLERANCE => End::FalselyMixed,
            "mixed" => End::Mixed,
            _ => End::Undecided,
        };
    };
    let all = |adds: fn(&Adds) -> &Option<Vec<Given>>| {
        proofs.iter().all(|proof| matches!(proof, Proof::Adds(of) if adds(of).is_some()))
    };
    if all(|adds| &adds.mean) {
        assert!(mean < TOLERANCE, "{name} is no mean: {mean:.1e}");
    }
    if all(|adds| &adds.sum) && (adds.once.is_none() || adds.once_in.is_some()) {
        assert!(sum < TOLERANCE, "{name} is no sum: {sum:.1e}");
    }
    match said {
        "sum and once" | "given, and once" => End::Once,
        _ if said.starts_with("given") => End::Given,
        _ => End::Proved,
    }
}

fn in_64_bits() -> <B as burn::tensor::backend::BackendTypes>::Device {
    let device = Default::default();
    // Once for all tests.
    let _ = set_default_dtypes::<B>(&device, DType::F64, DType::I64);
    device
}

/// One test at a time: burn-autodiff may lose a part of a graph that one thread records while a
/// backward pass of another ends.
fn alone() -> impl Drop {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The same numbers in all tests.
fn net(device: &<B as burn::tensor::backend::BackendTypes>::Device) -> Net<B> {
    <B as Backend>::seed(device, 7);
    let net = wide(Net::<B>::new(device));
    firebox::initialize::<B, _>(&net);
    net
}

/// The losses of burn-nn and others: what is said of each, and that it is right.
#[test]
fn losses() {
    let _alone = alone();
    let device = in_64_bits();
    let model = net(&device);
    let (mut table, mut counted) = (Vec::new(), Vec::new());
    for (name, expected) in LOSSES {
        let model = losses::Case { net: model.clone(), loss: name };
        let batch = Batch::new(ITEMS, &device);
        let proofs = proofs(&model, &batch, &PARTS);
        let proof = least(&proofs);
        let end = judged(name, &proofs, apart(&model, &batch, (&PARTS, &proofs)));
        println!("{name:24} {:16} {end:?} {proof:?}", said(proof));
        let as_batches = apart_as_batches(&model, &batch, (&PARTS, &proofs));
        if let Some(apart) = as_batches {
            assert!(apart < TOLERANCE, "{name} does not weigh what it counts: {apart:.1e}");
            counted.push(*name);
        }
        if said(proof) != *expected {
            table.push(format!("{name}: {} instead of {expected}: {proof:?}", said(proof)));
        }
        assert_ne!(end, End::FalselyMixed, "{name}");
    }
    assert!(table.is_empty(), "{table:#?}");
    assert_eq!(counted, losses::COUNTED);
}

/// Parts of one item have no sums over dimensions of one.
#[test]
fn parts_of_one_item() {
    let _alone = alone();
    let device = in_64_bits();
    let model = net(&device);
    for (name, expected) in LOSSES.iter().filter(|(_, said)| ["mean", "sum"].contains(said)) {
        let model = losses::Case { net: model.clone(), loss: name };
        let batch = Batch::new(ITEMS, &device);
        let proofs = proofs(&model, &batch, &SINGLE);
        let proof = least(&proofs);
        judged(name, &proofs, apart(&model, &batch, (&SINGLE, &proofs)));
        assert_eq!(said(proof), *expected, "{name}: {proof:?}");
    }
}

fn of_zoo<M>(expected: &str)
where
    M: Zoo<B> + TrainStep<Input = <M as Zoo<B>>::Batch> + AutodiffModule<B>,
{
    let device = in_64_bits();
    let model = wide(<M as Zoo<B>>::new(&device));
    let batch = M::batch(&(0..ITEMS).map(|item| item * 37 + 5).collect::<Vec<_>>(), &device);
    let begin = Instant::now();
    let proofs = proofs(&model, &batch, &PARTS);
    let proof = least(&proofs);
    println!("{:12} {:.1?} {proof:?}", M::NAME, begin.elapsed());
    assert_eq!(said(proof), expected, "{}: {proof:?}", M::NAME);
}

#[test]
fn models() {
    let _alone = alone();
    of_zoo::<zoo::Mlp<B>>("mean");
    of_zoo::<zoo::Wide<B>>("mean");
    of_zoo::<zoo::Gpt<B>>("mean");
    of_zoo::<zoo::Encoder<B>>("mean");
    of_zoo::<zoo::Recurrent<B>>("mean");
    of_zoo::<zoo::UNet<B>>("mean");
    of_zoo::<zoo::Autoencoder<B>>("mean");
    of_zoo::<zoo::Siamese<B>>("mean");
    // They normalize over the batch.
    of_zoo::<zoo::Cnn<B>>("mixed");
    of_zoo::<zoo::ResNet<B>>("mixed");
    // It reads values.
    of_zoo::<zoo::Reader<B>>("undecided");
}

/// Prints the operations of a program whose proof is wrong.
fn show(trace: &Trace) {
    for (at, call) in trace.calls() {
        let inputs: Vec<u32> = call.inputs.iter().map(|input| input.tensor.0).collect();
        let shapes = call.outputs.iter().map(|made| (made.0, trace.tensor(*made).shape.to_vec()));
        println!("{at} {} {inputs:?} -> {:?}", call.name, shapes.collect::<Vec<_>>());
    }
    for (at, tensor) in trace.tensors.iter().enumerate() {
        if let Some(label) = tensor.label.as_ref() {
            println!("{at} {:?} {}", label.category, label.name);
        }
    }
}

fn setting(name: &str, default: u64) -> u64 {
    let number = |text: String| text.parse().unwrap_or_else(|_| panic!("{name} is a number"));
    std::env::var(name).map_or(default, number)
}

/// What is proved of random programs is so.
#[test]
fn random_programs() {
    let _alone = alone();
    let device = in_64_bits();
    let net = net(&device);
    let (from, cases) = (setting("PROOF_FROM", 1), setting("PROOF_CASES", 200));
    let mut ends = BTreeMap::<End, usize>::new();
    let (mut falsely, mut counted) = (Vec::new(), 0);
    for seed in from..from + cases {
        let model = random::Program { net: net.clone(), seed };
        let batch = Batch::new(ITEMS, &device);
        let proofs = proofs(&model, &batch, &PARTS);
        let proof = least(&proofs);
        let apart = || apart(&model, &batch, (&PARTS, &proofs));
        let end =
            catch_unwind(AssertUnwindSafe(|| judged(&format!("program {seed}"), &proofs, apart())));
        let Ok(end) = end else {
            let whole = recorded(&model, &batch, 0..ITEMS).expect("it was recorded");
            show(whole.trace());
            panic!("program {seed} is no {}: {:?}", said(proof), apart());
        };
        *ends.entry(end).or_default() += 1;
        if let Some(apart) = apart_as_batches(&model, &batch, (&PARTS, &proofs)) {
            if apart >= TOLERANCE {
                show(recorded(&model, &batch, 0..ITEMS).expect("it was recorded").trace());
                panic!("program {seed} does not weigh what it counts: {apart:.1e}, {proof:?}");
            }
            counted += 1;
        }
        if let (End::Undecided, Proof::Undecided(why)) = (end, proof) {
            println!("program {seed}: {why}");
        }
        if end == End::FalselyMixed {
            println!("program {seed}: {proof:?}");
            falsely.push(seed);
        }
    }
    println!("{ends:?}, {counted} with a weight, falsely mixed: {falsely:?}");
    let of = |end: End| ends.get(&end).copied().unwrap_or(0);
    assert!(of(End::Proved) * 10 > cases as usize, "{ends:?}");
    assert!(of(End::FalselyMixed) * 10 <= of(End::Mixed), "{ends:?}");
}
