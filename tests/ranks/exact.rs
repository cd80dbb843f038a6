//! Bitwise equality with one rank on the global batch, where no rounding can hide a wrong weight: a
//! loss that is linear in the parameters, on whole numbers, with weights that add up to powers of
//! two.

use burn::backend::Flex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use burn::module::{Module, Param};
use burn::optim::SgdConfig;
use burn::optim::decay::WeightDecayConfig;
use burn::prelude::*;
use burn::tensor::DType;
use burn::tensor::backend::AutodiffBackend;
use burn::train::metric::{Adaptor, ItemLazy, LossInput};
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{InferenceStep, SupervisedTraining, TrainOutput, TrainStep};
use firebox::{Bytes, Lazy, Learner, LossReduction, MicroBatch, Ranks, TrainError};
use firebox_testing::task::{Given, weights};
use libtest_mimic::Trial;

use crate::job::{B, Job, Said, bits, kind};
use crate::launch::run as launch;

/// The weights of the items of each rank, in one step, by the number of ranks. Those of a rank, and
/// those of all, add up to a power of two.
const SHARES: [&[&[u32]]; 4] = [
    &[&[3, 1, 4, 8]],
    &[&[1, 3, 4], &[2, 6]],
    &[&[4], &[1, 2, 1, 4], &[3, 1]],
    &[&[1, 1], &[2, 4, 2], &[3, 1], &[2]],
];

/// The same with more than one item for each rank: one shows nothing of its batch.
const PAIRS: [&[&[u32]]; 4] = [
    SHARES[0],
    SHARES[1],
    &[&[1, 3], &[1, 2, 1, 4], &[3, 1]],
    &[&[1, 1], &[2, 4, 2], &[3, 1], &[1, 1]],
];

/// Whether the loss is a sum.
static SUMS: AtomicBool = AtomicBool::new(false);

/// Whether batches do not say what they weigh.
static FOLLOWS: AtomicBool = AtomicBool::new(false);

/// Whether the loss couples its items.
static COUPLES: AtomicBool = AtomicBool::new(false);

/// How many batches a rank has. Those of rank 1, or of the only rank, last longest. A penalty
/// counts once where all ranks have one.
fn batches_of(rank: usize, world: usize) -> usize {
    if rank == 1 || world == 1 || SUMS.load(Relaxed) { 6 } else { 4 }
}

#[derive(Clone, Debug, MicroBatch)]
#[micro_batch(weight = weight_of)]
struct Tokens<B: Backend> {
    first: Tensor<B, 2>,
    /// Only some batches use the second parameter.
    second: Option<Tensor<B, 2>>,
    weights: Tensor<B, 1>,
}

fn weight_of<B: Backend>(batch: &Tokens<B>) -> f64 {
    match FOLLOWS.load(Relaxed) {
        true => batch.weights.dims()[0] as f64,
        false => batch.weights.clone().sum().into_scalar().elem(),
    }
}

#[derive(Module, Debug)]
struct Linear<B: Backend> {
    first: Param<Tensor<B, 1>>,
    second: Param<Tensor<B, 1>>,
    unused: Param<Tensor<B, 1>>,
}

struct Loss<B: Backend>(Tensor<B, 1>);

impl<B: Backend> ItemLazy for Loss<B> {
    type ItemSync = Self;

    fn sync(self) -> Self {
        self
    }
}

impl<B: Backend> Adaptor<LossInput<B>> for Loss<B> {
    fn adapt(&self) -> LossInput<B> {
        LossInput::new(self.0.clone())
    }
}

impl<B: Backend> Linear<B> {
    fn new(device: &B::Device) -> Self {
        let param = |values: [f32; 2]| Param::from_tensor(Tensor::from_floats(values, device));
        Self { first: param([1.0, -2.0]), second: param([3.0, 0.5]), unused: param([7.0, 7.0]) }
    }

    /// A weighted mean of the items' losses, or with `PENALTY` their sum and a penalty.
    fn loss(&self, batch: Tokens<B>) -> Tensor<B, 1> {
        let dtype = self.first.val().dtype();
        let weights = batch.weights.cast(dtype);
        let of = |inputs: Tensor<B, 2>, param: &Param<Tensor<B, 1>>| {
            (inputs.cast(dtype) * param.val().unsqueeze_dim(0)).sum_dim(1).flatten::<1>(0, 1)
        };
        let mut each = of(batch.first, &self.first);
        if let Some(second) = batch.second {
            each = each + of(second, &self.second);
        }
        let sum = (each * weights.clone()).sum();
        match SUMS.load(Relaxed) {
            false if COUPLES.load(Relaxed) => (sum / weights.sum()).powi_scalar(2),
            false => sum / weights.sum(),
            true => sum + self.first.val().sum() * (16.0 * firebox::batch_share()),
        }
    }
}

impl<B: AutodiffBackend> TrainStep for Linear<B> {
    type Input = Tokens<B>;
    type Output = Loss<B>;

    fn step(&self, batch: Tokens<B>) -> TrainOutput<Loss<B>> {
        let loss = self.loss(batch);
        TrainOutput::new(self, loss.backward(), Loss(loss.detach()))
    }
}

impl<B: Backend> InferenceStep for Linear<B> {
    type Input = Tokens<B>;
    type Output = Loss<B>;

    fn step(&self, batch: Tokens<B>) -> Loss<B> {
        Loss(self.loss(batch))
    }
}

/// Inputs of both parameters, and a weight.
type Item = ([f32; 2], [f32; 2], f32);

/// The items of a rank in a step.
fn items(step: usize, rank: usize, world: usize) -> Vec<Item> {
    // Nothing of a rank counts in two steps: the mean over its batch is not a number.
    let counts = !(step / 2 == 1 && rank == 1 && world > 2);
    let of_ranks = if FOLLOWS.load(Relaxed) { PAIRS } else { SHARES };
    let weights = of_ranks[world - 1][rank].iter().map(|weight| weight * u32::from(counts));
    let wave = |n: usize| (n * 7919 % 17) as f32 - 8.0;
    let of = |(item, weight): (usize, u32)| {
        let n = ((step * 5 + rank) * 7 + item) * 4;
        // Rank 0 does not use the second parameter.
        let second = if rank == 0 { [0.0; 2] } else { [wave(n + 2), wave(n + 3)] };
        ([wave(n), wave(n + 1)], second, weight as f32)
    };
    weights.enumerate().map(of).collect()
}

fn batch<B: Backend>(items: &[Item], uses_second: bool) -> Tokens<B> {
    let device = Default::default();
    let matrix = |of: &dyn Fn(&Item) -> [f32; 2]| {
        let values: Vec<f32> = items.iter().flat_map(of).collect();
        Tensor::from_data(TensorData::new(values, [items.len(), 2]), &device)
    };
    let weights: Vec<f32> = items.iter().map(|item| item.2).collect();
    Tokens {
        first: matrix(&|item| item.0),
        second: uses_second.then(|| matrix(&|item| item.1)),
        weights: Tensor::from_data(TensorData::new(weights, [items.len()]), &device),
    }
}

fn train(
    ranks: Option<&Ranks>,
    model: Linear<B>,
    batches: Vec<Tokens<B>>,
    accumulation: usize,
    micro_batch: Option<usize>,
) -> Result<Linear<Lazy<Flex>>, TrainError> {
    let folder = tempfile::tempdir().expect("a folder");
    let valid = batch::<Lazy<Flex>>(&items(0, 0, 1), true);
    let training =
        SupervisedTraining::new(folder.path(), Given::loader(batches), Given::loader(vec![valid]))
            .grads_accumulation(accumulation)
            .with_application_logger(None)
            .renderer(CliMetricsRenderer::new())
            .num_epochs(2);
    let builder = Learner::builder().auto_batch().memory(Bytes::mib(64)).quiet();
    let builder = match ranks {
        Some(ranks) => builder.ranks(ranks.clone()),
        None => builder,
    };
    let builder = match micro_batch {
        Some(items) => builder.micro_batch(items),
        None => builder,
    };
    // A decay changes a parameter that has a gradient of zero, but not one that has none.
    let optimizer = SgdConfig::new().with_weight_decay(Some(WeightDecayConfig::new(0.0625)));
    let builder = match SUMS.load(Relaxed) {
        true => builder.reduction(LossReduction::Sum),
        false => builder,
    };
    // Small enough for sums.
    let rate = if SUMS.load(Relaxed) { 1.0 / 64.0 } else { 0.5 };
    let learner = builder.build(model, optimizer.init(), rate);
    let fitted = learner.fit(training).map_err(|error| error.into_parts().0)?;
    Ok(fitted.model)
}

/// What several ranks say of a loss that is no sum over items.
pub fn coupled(ranks: &Ranks) -> Said {
    COUPLES.store(true, Relaxed);
    let (rank, world) = (ranks.rank(), ranks.world());
    let own = |step| batch(&items(step, rank, world), rank > 0);
    let model = Linear::<B>::new(&Default::default());
    let trained = train(Some(ranks), model, (0..3).map(own).collect(), 1, None);
    let error = trained.err().map(|error| (kind(&error).to_owned(), error.to_string()));
    Said { rank, error, ..Said::default() }
}

/// Parameters of 16 bit stay what they are, and the same on all ranks.
pub fn half(ranks: &Ranks) -> Said {
    let rank = ranks.rank();
    let half = |param: Param<Tensor<B, 1>>| {
        param.map(|value| Tensor::from_inner(value.inner().cast(DType::BF16)).require_grad())
    };
    let mut model = Linear::<B>::new(&Default::default());
    (model.first, model.second) = (half(model.first), half(model.second));
    if rank > 0 {
        // Rank 0 gives its own.
        model.first =
            model.first.map(|value| Tensor::from_inner(value.inner().zeros_like()).require_grad());
    }
    let own = |step| batch(&items(step, rank, ranks.world()), rank > 0);
    let trained = train(Some(ranks), model, (0..3).map(own).collect(), 1, None).expect("it fits");
    let wide = |param: &Param<Tensor<Lazy<Flex>, 1>>| {
        param.val().cast(DType::F32).into_data().to_vec::<f32>().expect("it was cast")
    };
    let weights = bits(vec![wide(&trained.first), wide(&trained.second)]);
    let dtype = trained.first.val().dtype();
    let error = (dtype != DType::BF16).then(|| ("type".to_owned(), format!("{dtype:?}")));
    Said { rank, weights, error, ..Said::default() }
}

/// Trains on this rank's share together with the others, and alone on the batches of all.
pub fn run(ranks: &Ranks, accumulation: usize, (sums, follows): (bool, bool)) -> Said {
    SUMS.store(sums, Relaxed);
    FOLLOWS.store(follows, Relaxed);
    let model = || Linear::<B>::new(&Default::default());
    let numbers = |model: Linear<Lazy<Flex>>| bits(weights::<Lazy<Flex>, _>(&model));
    let (rank, world) = (ranks.rank(), ranks.world());
    let own = |step| batch(&items(step, rank, world), rank > 0);
    // Odd ranks split their batches.
    let micro_batch = (rank % 2 == 1).then_some(1);
    let own: Vec<Tokens<B>> = (0..batches_of(rank, world)).map(own).collect();
    let together = train(Some(ranks), model(), own, accumulation, micro_batch);
    let together = numbers(together.expect("it fits"));
    let global = |step| {
        let all = (0..world).filter(|rank| step < batches_of(*rank, world));
        let all: Vec<_> = all.flat_map(|rank| items(step, rank, world)).collect();
        batch(&all, world > 1)
    };
    let alone = train(None, model(), (0..6).map(global).collect(), accumulation, None);
    let alone = numbers(alone.expect("it fits"));
    let begins = bits(weights::<B, _>(&model()));
    assert_eq!(together[2], begins[2], "nobody has a gradient of it");
    assert_ne!(together[0], begins[0]);
    assert_eq!(world > 1, together[1] != begins[1]);
    let error = (together != alone)
        .then(|| ("differs".to_owned(), format!("{together:?} instead of {alone:?}")));
    Said { rank, weights: together, error, ..Said::default() }
}

pub fn tests() -> Vec<Trial> {
    let case = |name: String, world: usize, job: Job| {
        Trial::test(format!("exact::{world}_ranks_{name}"), move || {
            let said = launch(&job, world);
            let differs = said.iter().find(|of| of.weights != said[0].weights);
            assert_eq!(differs, None, "ranks have different parameters");
            Ok(())
        })
    };
    let means = |world, accumulation| {
        let job = Job::Exact { accumulation, sums: false, follows: false };
        case(format!("accumulate_{accumulation}"), world, job)
    };
    // A third of the penalty is not exact.
    let of_sums = Job::Exact { accumulation: 1, sums: true, follows: false };
    let sums = |world| case("sum".to_owned(), world, of_sums.clone());
    let follows = |(world, accumulation)| {
        let job = Job::Exact { accumulation, sums: false, follows: true };
        case(format!("accumulate_{accumulation}_without_stated_weights"), world, job)
    };
    let mut tests: Vec<Trial> =
        (1..=4).flat_map(|world| [means(world, 1), means(world, 2)]).collect();
    tests.extend([1, 2, 4].map(sums));
    tests.extend([(2, 1), (3, 2), (4, 1)].map(follows));
    tests.push(case("of_16_bit".to_owned(), 3, Job::Half));
    tests
}
