//! Training in 16 bit against 32 bit: the loss after some hundred steps, and what the activations
//! take, as tensors and on a card. On Flex, from the same parameters and on the same batches. The
//! part `learner` trains through the Learner, which scales losses in half floats.

use std::io::Read as _;
use std::sync::Arc;

use burn::backend::flex::FlexDevice;
use burn::backend::{Autodiff, Flex};
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataset::InMemDataset;
use burn::module::{AutodiffModule, Module, ModuleMapper, Param};
use burn::optim::{AdamConfig, GradientsParams, Optimizer};
use burn::record::{BinBytesRecorder, FullPrecisionSettings, Recorder as _};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor, TensorData, f16};
use burn::train::metric::LossMetric;
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{
    ClassificationOutput, InferenceStep, SupervisedTraining, TrainOutput, TrainStep,
};
use comfy_table::presets::ASCII_MARKDOWN;
use comfy_table::{CellAlignment, Table};
use firebox::dry::{Card, Dry, DryPooledCuda};
use firebox::trace::{Heap, MemoryModel, StepRecorder, Trace};
use firebox::{Bytes, Half, Lazy, LazyBackend, Learner, WeightedGradients, initialize};
use firebox_testing::bench::{print_machine, rounds, wants};
use firebox_testing::full_size::gpt::{Gpt, Texts};
use firebox_testing::full_size::resnet::{Photos, ResNet50};
use firebox_testing::zoo::{self, Numbered, Zoo};

type Full = Autodiff<Lazy<Flex>>;
type Sixteen = Autodiff<Half<Lazy<Flex>>>;
type Floats = Autodiff<Half<Lazy<Flex>, f16>>;
type Bytewise = BinBytesRecorder<FullPrecisionSettings>;

const CARD: &str = "RTX 4090";
/// Trainings from different parameters. Their differences vary: successive normalizations magnify
/// rounding.
const TRAININGS: usize = 5;
/// Items of a batch, and how many batches come in turn.
const ITEMS: usize = 32;
const BATCHES: usize = 100;

fn main() {
    print_machine();
    let steps = if rounds(2) == 1 { 3 } else { 300 };
    let (fast, slow) = (wants("loss, fast"), wants("loss, slow"));
    if fast || slow {
        let heads = ["model", "loss at first", "32 bit", "from rounded parameters", "16 bit"];
        let mut table = table(heads);
        macro_rules! of_zoo {
            ($name:literal, $model:ident, $rate:literal) => {
                losses::<zoo::$model<Full>, zoo::$model<Sixteen>>(
                    &mut table,
                    $name,
                    (steps, $rate),
                    (&made::<Full, zoo::$model<Full>>, &made::<Sixteen, zoo::$model<Sixteen>>),
                );
            };
        }
        let digits = Digits::load();
        let of_digits = |table: &mut Table, name: &str, rate: f64| {
            losses::<zoo::ResNet<Full>, zoo::ResNet<Sixteen>>(
                table,
                name,
                (steps, rate),
                (&|at| digits.batch::<Full>(at), &|at| digits.batch::<Sixteen>(at)),
            );
        };
        if slow {
            of_digits(&mut table, "ResNet, digits, rate 0.0001", 1e-4);
            of_digits(&mut table, "ResNet, digits, rate 0.00003", 3e-5);
            of_zoo!("ResNet, waves, rate 0.0001", ResNet, 1e-4);
        }
        if fast {
            of_zoo!("GPT, texts that repeat", Gpt, 1e-3);
            of_zoo!("encoder, waves", Encoder, 1e-3);
            of_zoo!("ResNet, waves", ResNet, 1e-3);
            of_digits(&mut table, "ResNet, digits", 1e-3);
        }
        println!(
            "Mean loss of {BATCHES} batches of {ITEMS} after {steps} steps of Adam (rate 0.001, if no other is named), over {TRAININGS} trainings; mean \
             difference from 32 bit, with its standard error\n{table}"
        );
    }
    if wants("learner") {
        learner(rounds(2) > 1);
    }
    if wants("activations") {
        activations(rounds(2) > 1);
    }
}

fn table<const N: usize>(heads: [&str; N]) -> Table {
    let mut table = Table::new();
    table.load_preset(ASCII_MARKDOWN).set_header(heads);
    let right = |column: &mut comfy_table::Column| {
        column.set_cell_alignment(CellAlignment::Right);
    };
    table.column_iter_mut().skip(1).for_each(right);
    table
}

/// The batch of a step.
type Batches<'a, B, M> = &'a dyn Fn(usize) -> <M as Zoo<B>>::Batch;

/// Batches of the zoo's own data.
fn made<B, M>(step: usize) -> M::Batch
where
    B: Backend<Device = FlexDevice>,
    M: Zoo<B>,
{
    let at = step % BATCHES;
    M::batch(&(at * ITEMS..(at + 1) * ITEMS).collect::<Vec<_>>(), &FlexDevice)
}

/// Handwritten digits of 8 x 8 pixels, enlarged to those of the zoo's ResNet.
struct Digits {
    pixels: Vec<[f32; 64]>,
    classes: Vec<i32>,
}

impl Digits {
    fn load() -> Self {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../datasets/digits.csv.gz");
        let file = std::fs::File::open(path).expect("it comes with the sources");
        let mut text = String::new();
        flate2::read::GzDecoder::new(file).read_to_string(&mut text).expect("it can be read");
        let (mut pixels, mut classes) = (Vec::new(), Vec::new());
        for line in text.lines() {
            let numbers: Vec<f32> = line.split(',').filter_map(|n| n.parse().ok()).collect();
            let (class, image) = numbers.split_last().expect("a line has numbers");
            pixels.push(std::array::from_fn(|at| image[at] / 16.0));
            classes.push(*class as i32);
        }
        Self { pixels, classes }
    }

    fn batch<B: Backend<Device = FlexDevice>>(
        &self,
        step: usize,
    ) -> <zoo::ResNet<B> as Zoo<B>>::Batch {
        let images: Vec<usize> =
            (0..ITEMS).map(|item| (step * ITEMS + item) % self.pixels.len()).collect();
        let pixels: Vec<f32> = images.iter().flat_map(|image| self.pixels[*image]).collect();
        let classes: Vec<i32> = images.iter().map(|image| self.classes[*image]).collect();
        let small =
            Tensor::<B, 6>::from_data(TensorData::new(pixels, [ITEMS, 1, 8, 1, 8, 1]), &FlexDevice);
        let mut batch = zoo::ResNet::<B>::batch(&images, &FlexDevice);
        batch.pixels = small.expand([ITEMS, 3, 8, 8, 8, 8]).reshape([ITEMS, 3, 64, 64]);
        batch.targets = Tensor::from_data(TensorData::new(classes, [ITEMS]), &FlexDevice);
        batch
    }
}

/// The loss of a model that the Learner trains in each type, with losses scaled in half floats.
fn learner(is_full: bool) {
    let device = Default::default();
    let mut table = table(["model", "32 bit", "brain floats", "half floats"]);
    macro_rules! of_zoo {
        ($name:literal, $model:ident, $rate:literal) => {{
            let mut losses = [0.0; 3];
            let trainings = if is_full { TRAININGS } else { 1 };
            for seed in 0..trainings as u64 {
                <Full as Backend>::seed(&device, seed);
                let model = zoo::$model::<Full>::new(&device);
                initialize(&model);
                let initial = Bytewise::new().record(model.into_record(), ()).expect("recorded");
                let ends = [
                    learned::<Full, zoo::$model<Full>, zoo::$model<_>>(&initial, $rate, is_full),
                    learned::<Sixteen, zoo::$model<_>, zoo::$model<_>>(&initial, $rate, is_full),
                    learned::<Floats, zoo::$model<_>, zoo::$model<_>>(&initial, $rate, is_full),
                ];
                losses.iter_mut().zip(ends).for_each(|(sum, end)| *sum += end / trainings as f64);
            }
            let [full, brain, half] = losses;
            let shown = |loss: f64| format!("{loss:.4} ({:+.2} %)", 100.0 * (loss / full - 1.0));
            table.add_row([$name.to_owned(), format!("{full:.4}"), shown(brain), shown(half)]);
        }};
    }
    of_zoo!("GPT, texts that repeat", Gpt, 1e-3);
    of_zoo!("ResNet, waves, rate 0.00003", ResNet, 3e-5);
    println!(
        "Mean loss of the last of three epochs of {BATCHES} batches, in the mean of trainings"
    );
    println!("{table}");
}

/// Trains through the Learner for three epochs. Returns the mean loss of the last.
fn learned<B, M, V>(initial: &[u8], rate: f64, is_full: bool) -> f64
where
    B: AutodiffBackend<Device = FlexDevice> + LazyBackend<Base = Flex>,
    B::InnerBackend: LazyBackend<Base = Flex>,
    M: Zoo<B> + AutodiffModule<B, InnerModule = V> + std::fmt::Display + 'static,
    M: TrainStep<Input = <M as Zoo<B>>::Batch, Output = ClassificationOutput<B>>,
    V: Zoo<B::InnerBackend> + 'static,
    V: InferenceStep<
            Input = <V as Zoo<B::InnerBackend>>::Batch,
            Output = ClassificationOutput<B::InnerBackend>,
        >,
{
    let device = Default::default();
    B::seed(&device, 7);
    let folder = tempfile::tempdir().expect("there is room for a folder");
    let numbers = |count| InMemDataset::new((0..count).collect::<Vec<usize>>());
    let batches = if is_full { BATCHES } else { 1 };
    let train = DataLoaderBuilder::<B, _, _>::new(Numbered::<M>::default());
    let valid = DataLoaderBuilder::<B::InnerBackend, _, _>::new(Numbered::<V>::default());
    let training = SupervisedTraining::new(
        folder.path(),
        train.batch_size(ITEMS).build(numbers(batches * ITEMS)),
        valid.batch_size(ITEMS).build(numbers(ITEMS)),
    );
    let training = training
        .metrics((LossMetric::new(),))
        .with_application_logger(None)
        .renderer(CliMetricsRenderer::new())
        .num_epochs(3);
    let record = Bytewise::new().load(initial.to_vec(), &device).expect("it was recorded here");
    let model = M::new(&device).load_record(record);
    let builder = Learner::builder().auto_batch().memory(Bytes::gib(4)).quiet();
    builder.build(model, AdamConfig::new().init(), rate).fit(training).expect("it fits");
    let log = folder.path().join("train/epoch-3/Loss.log");
    let log = std::fs::read_to_string(log).expect("burn writes a log");
    let losses: Vec<f64> =
        log.lines().filter_map(|line| line.split(',').next()?.parse().ok()).collect();
    losses.iter().sum::<f64>() / losses.len() as f64
}

/// Trains for some steps. Returns the losses of the first and of the last round of batches.
fn train<B, M>(
    initial: &[u8],
    (steps, rate): (usize, f64),
    batches: Batches<'_, B, M>,
) -> (f64, f64)
where
    B: AutodiffBackend<Device = FlexDevice> + LazyBackend<Base = Flex>,
    B::InnerBackend: LazyBackend<Base = Flex>,
    M: Zoo<B> + AutodiffModule<B>,
    M: TrainStep<Input = <M as Zoo<B>>::Batch, Output = ClassificationOutput<B>>,
{
    let device = Default::default();
    B::seed(&device, 7);
    let record = Bytewise::new().load(initial.to_vec(), &device).expect("it was recorded here");
    let mut model = M::new(&device).load_record(record);
    let mut optimizer = AdamConfig::new().init::<B, M>();
    let mut losses = Vec::new();
    for step in 0..steps {
        let TrainOutput { grads, item } = model.step(batches(step));
        let loss = item.loss.into_data().convert::<f64>();
        losses.push(loss.to_vec::<f64>().expect("a number")[0]);
        // The types of parameters.
        let mut sum = WeightedGradients::mean(1.0);
        sum.add(&model, grads, 1.0);
        let grads: GradientsParams = sum.finish(&model);
        model = optimizer.step(rate, model, grads);
    }
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    let round = BATCHES.min(steps);
    (mean(&losses[..round]), mean(&losses[steps - round..]))
}

fn losses<M, H>(
    table: &mut Table,
    name: &str,
    course: (usize, f64),
    (of_full, of_half): (Batches<'_, Full, M>, Batches<'_, Sixteen, H>),
) where
    M: Zoo<Full> + AutodiffModule<Full>,
    M: TrainStep<Input = <M as Zoo<Full>>::Batch, Output = ClassificationOutput<Full>>,
    H: Zoo<Sixteen> + AutodiffModule<Sixteen>,
    H: TrainStep<Input = <H as Zoo<Sixteen>>::Batch, Output = ClassificationOutput<Sixteen>>,
{
    let device = Default::default();
    let trainings = if rounds(2) == 1 { 1 } else { TRAININGS };
    let losses: Vec<[f64; 4]> = (0..trainings as u64)
        .map(|seed| {
            <Full as Backend>::seed(&device, seed);
            let model = M::new(&device);
            initialize(&model);
            let record =
                |model: M| Bytewise::new().record(model.into_record(), ()).expect("it is recorded");
            let (initial, rounded) = (record(model.clone()), record(model.map(&mut Rounded)));
            let (first, full) = train::<Full, M>(&initial, course, of_full);
            // How far apart trainings end that differ by one rounding at the beginning.
            let (_, rounded) = train::<Full, M>(&rounded, course, of_full);
            let (_, half) = train::<Sixteen, H>(&initial, course, of_half);
            [first, full, rounded, half]
        })
        .collect();
    let mean =
        |of: &dyn Fn(&[f64; 4]) -> f64| losses.iter().map(of).sum::<f64>() / losses.len() as f64;
    let compared = |at: usize| {
        let differs = |losses: &[f64; 4]| 100.0 * (losses[at] / losses[1] - 1.0);
        let by = mean(&differs);
        let variance = mean(&|losses| (differs(losses) - by).powi(2));
        let error = (variance / (losses.len() - 1).max(1) as f64).sqrt();
        format!("{:.4} ({by:+.2} ± {error:.2} %)", mean(&|losses| losses[at]))
    };
    let in_full = [0, 1].map(|at| format!("{:.4}", mean(&|losses| losses[at])));
    let cells = in_full.into_iter().chain([2, 3].map(compared));
    table.add_row(std::iter::once(name.to_owned()).chain(cells));
}

/// Rounds parameters to 16 bit.
struct Rounded;

impl<B: AutodiffBackend> ModuleMapper<B> for Rounded {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        param.map(|tensor| {
            let requires = tensor.is_require_grad();
            let rounded = tensor.inner().cast(DType::BF16).cast(DType::F32);
            Tensor::from_inner(rounded).set_require_grad(requires)
        })
    }
}

/// A forward and a backward pass.
fn pass<B, M>(model: &M, batch: M::Input) -> Trace
where
    B: AutodiffBackend + LazyBackend<Base = Flex>,
    M: TrainStep + AutodiffModule<B>,
{
    initialize(model);
    let recording = StepRecorder::new().record::<Flex, _>(|| model.step(batch).grads);
    recording.expect("nothing else is recorded here").discard().trace
}

/// What a pass takes above what existed before.
fn above(trace: &Trace, memory: &dyn MemoryModel) -> Bytes {
    let footprint = memory.footprint(trace);
    let in_use = footprint.paging.as_ref().map_or(footprint.peak, |paging| paging.in_use);
    in_use - footprint.baseline
}

fn activations(is_full: bool) {
    let mut table = table([
        "pass",
        "tensors, 32 bit",
        "16 bit",
        "times",
        "RTX 4090, 32 bit",
        "16 bit",
        "times",
    ]);
    let card = Card::named(CARD).expect("it is in the table");
    let device = Default::default();
    let int =
        <<Flex as burn::tensor::backend::BackendTypes>::IntElem as burn_backend::Element>::dtype();
    let card = Dry::<DryPooledCuda>::new(card.properties()).with_traces_of_ints(int);
    let card: Arc<dyn MemoryModel> = Arc::new(card);
    let mut row = |name: &str, full: &Trace, half: &Trace| {
        let tensors = Heap::simple();
        let mut cells = vec![name.to_owned()];
        for memory in [&tensors as &dyn MemoryModel, &*card] {
            let (full, half) = (above(full, memory), above(half, memory));
            let times = format!("{:.2}", half.ratio(full));
            cells.extend([full.to_string(), half.to_string(), times]);
        }
        table.add_row(cells);
    };
    macro_rules! gpt {
        ($name:literal, $dropout:expr, $layers:expr, $width:expr, $length:expr, $items:expr) => {
            let full = Gpt::<Full>::with_dropout($dropout, $layers, $width, $length, &device);
            let half = Gpt::<Sixteen>::with_dropout($dropout, $layers, $width, $length, &device);
            row(
                $name,
                &pass::<Full, _>(&full, Texts::new($items, $length, &device)),
                &pass::<Sixteen, _>(&half, Texts::new($items, $length, &device)),
            );
        };
    }
    if !is_full {
        gpt!("GPT 2 x 64, 4 x 64 tokens", 0.0, 2, 64, 64, 4);
        println!("{table}");
        return;
    }
    gpt!("GPT 12 x 768, 4 x 512 tokens", 0.0, 12, 768, 512, 4);
    gpt!("  with dropout", 0.1, 12, 768, 512, 4);
    gpt!("GPT 48 x 512, 2 x 512 tokens", 0.0, 48, 512, 512, 2);
    let (full, half) = (ResNet50::<Full>::new(&device), ResNet50::<Sixteen>::new(&device));
    row(
        "ResNet-50, 32 x 224 x 224",
        &pass::<Full, _>(&full, Photos::new(32, 224, &device)),
        &pass::<Sixteen, _>(&half, Photos::new(32, 224, &device)),
    );
    println!("{table}");
}
