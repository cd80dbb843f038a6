//! What a GPU's pools reserve for training steps: in a dry run, for real, and as predicted and
//! measured by a planned loop, each in a process of its own.
//!
//! `cargo bench --features wgpu,fusion --bench accuracy -- [--random N] [MODEL ...]`, or with the
//! feature `cuda` and `--device cuda`. `--blank` runs on a driver that keeps books and computes
//! nothing, and with `--quarters` trains on batches that take four times a card's memory.

use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use burn::backend::DispatchDevice;
use burn::cubecl::MemoryScope;
use burn::cubecl::dry_run::DryRun;
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::{Device, Tensor};
use clap::{Parser, ValueEnum};
use comfy_table::Table;
use comfy_table::presets::ASCII_MARKDOWN;
use firebox::{Budget, Bytes, Learner, WeightedGradients};
use firebox_blank::{Blank, Settings};
use serde::{Deserialize, Serialize};

use zoo::{Cnn, Encoder, Gpt, Mlp, Recurrent, ResNet, UNet, Zoo};

mod zoo;

#[derive(Parser)]
struct Options {
    #[arg(long, value_enum, default_value_t = Kind::Wgpu)]
    device: Kind,
    /// Runs on a CUDA driver that computes nothing.
    #[arg(long)]
    blank: bool,
    /// How many cases of a random model and size to add.
    #[arg(long, default_value_t = 0)]
    random: usize,
    /// Leaves out the cases that are listed.
    #[arg(long)]
    only_random: bool,
    /// Trains on batches that take four times a card's memory, and does nothing else.
    #[arg(long)]
    quarters: bool,
    /// The models. Default: all.
    models: Vec<String>,
    /// Runs one case in this process.
    #[arg(long, value_enum, hide = true)]
    child: Option<Way>,
    #[arg(long, hide = true, default_value_t = 0)]
    items: usize,
    /// What cargo hands to every bench.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Kind {
    Cuda,
    Wgpu,
}

/// How the steps of a case are taken.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Way {
    /// Three steps in a dry run.
    Dry,
    /// Three steps.
    Real,
    /// Three steps in a loop that is planned, with room for all.
    Planned,
    /// The same within what is free.
    Fitted,
}

/// What a child has found.
#[derive(Default, Serialize, Deserialize)]
struct Found {
    /// The bytes of all pages after each step.
    pages: Vec<u64>,
    predicted: u64,
    measured: u64,
    /// The micro-batches of a batch.
    parts: usize,
    /// How long the last step took, or planning.
    seconds: f64,
}

const MODELS: [&str; 7] = ["mlp", "cnn", "resnet", "unet", "encoder", "gpt", "lstm"];

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    if let Some(way) = options.child {
        let found = child(&options, way)?;
        println!("{}", serde_json::to_string(&found)?);
        return Ok(());
    }
    let is_named =
        |model: &&str| options.models.is_empty() || options.models.iter().any(|it| it == model);
    let models: Vec<&str> = MODELS.into_iter().filter(is_named).collect();
    ensure!(!models.is_empty(), "the models are {MODELS:?}");
    if options.quarters {
        return quarters(&options, &models);
    }
    let mut cases = Vec::new();
    if !options.only_random {
        cases.extend(models.iter().flat_map(|model| sizes(model).map(|items| (*model, items))));
    }
    let mut random = Random(20_261_128);
    for _ in 0..options.random {
        let model = models[(random.next() * models.len() as f64) as usize];
        let [least, _, most] = sizes(model).map(|size| (size as f64).ln());
        cases.push((model, (least + random.next() * (most - least)).exp() as usize));
    }
    let mut table = Table::new();
    let header =
        ["model", "items", "dry", "real", "equal", "predicted", "measured", "ratio", "planning"];
    table.load_preset(ASCII_MARKDOWN).set_header(header);
    for (model, items) in cases {
        let begin = Instant::now();
        let run = |way, memory| run_case(&options, (model, items), way, memory);
        let [(dry, _), (real, _), (planned, _)] =
            [run(Way::Dry, ROOMY)?, run(Way::Real, ROOMY)?, run(Way::Planned, ROOMY)?];
        let equal = if dry.pages == real.pages { "yes" } else { "no" };
        let ratio = planned.predicted as f64 / planned.measured as f64;
        let bytes = mib(&[planned.predicted, planned.measured]);
        eprintln!("{model} {items}: {equal}, {bytes}, {ratio:.3}, {:.0?}", begin.elapsed());
        table.add_row([
            model.to_owned(),
            items.to_string(),
            mib(&dry.pages),
            mib(&real.pages),
            equal.to_owned(),
            mib(&[planned.predicted]),
            mib(&[planned.measured]),
            format!("{ratio:.3}"),
            format!("{:.1} s", planned.seconds),
        ]);
    }
    println!("{table}");
    Ok(())
}

/// Trains on batches that take four times a card's memory. The driver says what it gave out.
fn quarters(options: &Options, models: &[&str]) -> anyhow::Result<()> {
    ensure!(options.blank, "`--quarters` needs cards of any size: add `--blank`");
    let mut table = Table::new();
    let header =
        ["model", "items", "whole", "card", "micro-batches", "predicted", "measured", "driver"];
    table.load_preset(ASCII_MARKDOWN).set_header(header);
    for model in models {
        let items = 4 * sizes(model)[2];
        let run = |way, memory| run_case(options, (model, items), way, memory);
        let whole = run(Way::Dry, ROOMY)?.0.pages.into_iter().max().unwrap_or_default();
        let (parts, bytes) = match run(Way::Fitted, whole / 4) {
            Ok((it, driver)) => (it.parts.to_string(), [it.predicted, it.measured, driver]),
            // The child has said why.
            Err(_) => ("does not fit".to_owned(), [0; 3]),
        };
        eprintln!("{model} {items}: {parts}");
        let [whole, card] = [whole, whole / 4].map(|bytes| mib(&[bytes]));
        let [predicted, measured, driver] = bytes.map(|bytes| mib(&[bytes]));
        let row = [(*model).to_owned(), items.to_string(), whole, card, parts];
        table.add_row(row.into_iter().chain([predicted, measured, driver]));
    }
    println!("{table}");
    Ok(())
}

/// A linear congruential generator (Knuth, MMIX): the same cases on every machine.
struct Random(u64);

impl Random {
    /// A number from zero to one.
    fn next(&mut self) -> f64 {
        let next = self.0.wrapping_mul(6_364_136_223_846_793_005);
        self.0 = next.wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1_u64 << 53) as f64
    }
}

fn mib(bytes: &[u64]) -> String {
    let each: Vec<String> =
        bytes.iter().map(|bytes| format!("{:.2}", *bytes as f64 / f64::from(1 << 20))).collect();
    each.join(" ")
}

fn sizes(model: &str) -> [usize; 3] {
    match model {
        "mlp" => Mlp::SIZES,
        "cnn" => Cnn::SIZES,
        "resnet" => ResNet::SIZES,
        "unet" => UNet::SIZES,
        "encoder" => Encoder::SIZES,
        "gpt" => Gpt::SIZES,
        _ => Recurrent::SIZES,
    }
}

/// The memory of a card on which everything fits.
const ROOMY: u64 = 80 << 30;

/// Runs a case in a child process, on a card with so much memory where there is none. Returns what
/// the child found, and the most that the driver gave out.
fn run_case(
    options: &Options,
    (model, items): (&str, usize),
    way: Way,
    memory: u64,
) -> anyhow::Result<(Found, u64)> {
    const CONTEXT: u64 = 300 << 20;
    let program = std::env::current_exe()?;
    let card = firebox_blank::Device::new("card", memory + CONTEXT, (9, 0), 132);
    let blank = options.blank.then(|| Blank::install(&Settings::new([card]))).transpose()?;
    let mut command = match &blank {
        Some(blank) => blank.command(&program),
        None => Command::new(&program),
    };
    if let Some(path) = std::env::var_os("CUDA_PATH") {
        // Mathematical functions of kernels are in NVIDIA's library for devices.
        command.env("CUDA_PATH", path);
    }
    let name = |value: Option<clap::builder::PossibleValue>| {
        value.map(|value| value.get_name().to_owned()).unwrap_or_default()
    };
    command.arg(model).args(["--items", &items.to_string()]);
    command.args(["--device", &name(options.device.to_possible_value())]);
    command.args(["--child", &name(way.to_possible_value())]);
    let output = command.stderr(Stdio::inherit()).output()?;
    ensure!(output.status.success(), "{model} {items} {way:?}: {}", output.status);
    let text = String::from_utf8(output.stdout)?;
    let found = serde_json::from_str(text.lines().last().context("a child prints a line")?)?;
    let books = blank.as_ref().map(Blank::books).transpose()?.unwrap_or_default();
    Ok((found, books.iter().map(|books| books.device(0).peak()).max().unwrap_or_default()))
}

fn child(options: &Options, way: Way) -> anyhow::Result<Found> {
    let device = match options.device {
        #[cfg(feature = "cuda")]
        Kind::Cuda => Device::cuda(0_usize),
        #[cfg(not(feature = "cuda"))]
        Kind::Cuda => bail!("`--device cuda` needs the feature `cuda`"),
        #[cfg(feature = "wgpu")]
        Kind::Wgpu => Device::wgpu(burn::tensor::DeviceKind::DefaultDevice),
        #[cfg(not(feature = "wgpu"))]
        Kind::Wgpu => bail!("`--device wgpu` needs the feature `wgpu`"),
    };
    let device = device.autodiff();
    match options.models.first().map(String::as_str) {
        Some("mlp") => case::<Mlp>(options.items, &device, way),
        Some("cnn") => case::<Cnn>(options.items, &device, way),
        Some("resnet") => case::<ResNet>(options.items, &device, way),
        Some("unet") => case::<UNet>(options.items, &device, way),
        Some("encoder") => case::<Encoder>(options.items, &device, way),
        Some("gpt") => case::<Gpt>(options.items, &device, way),
        Some("lstm") => case::<Recurrent>(options.items, &device, way),
        other => bail!("{other:?} is no model"),
    }
}

fn case<M: Zoo>(items: usize, device: &Device, way: Way) -> anyhow::Result<Found> {
    device.seed(1);
    let model = M::new(device);
    made(&model);
    device.sync()?;
    match way {
        Way::Dry | Way::Real => steps(model, items, device, way),
        Way::Planned => planned(model, items, device, Bytes::new(ROOMY).into()),
        Way::Fitted => planned(model, items, device, Budget::free().margin(Bytes::ZERO)),
    }
}

fn steps<M: Zoo>(mut model: M, items: usize, device: &Device, way: Way) -> anyhow::Result<Found> {
    let mut optim = AdamConfig::new().init();
    let _guard = matches!(way, Way::Dry).then(DryRun::new);
    let mut found = Found::default();
    for _ in 0..3 {
        let begin = Instant::now();
        let loss = model.loss(M::batch(items, device));
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(1e-3, model.clone(), grads);
        device.sync()?;
        found.pages.push(reserved(device)?);
        found.seconds = begin.elapsed().as_secs_f64();
    }
    Ok(found)
}

fn planned<M: Zoo>(
    mut model: M,
    items: usize,
    device: &Device,
    budget: Budget,
) -> anyhow::Result<Found> {
    let mut optim = AdamConfig::new().init();
    let builder = Learner::builder().auto_batch().memory(budget).quiet();
    let mut steps = builder.step_planner(&model)?;
    for _ in 0..3 {
        let batch = M::batch(items, device);
        steps.step(&mut model, &mut optim, &batch, |model, optim, parts| {
            let mut gradients = WeightedGradients::mean(parts.weight());
            parts.each(|part, weight| {
                let grads = GradientsParams::from_grads(model.loss(part).backward(), model);
                gradients.add(model, grads, weight);
            })?;
            let grads = gradients.finish(model);
            *model = optim.step(1e-3, model.clone(), grads);
            Ok(())
        })?;
    }
    Ok(Found {
        predicted: steps.predicted().get(),
        measured: steps.measured().get(),
        parts: steps.plans().last().map_or(0, |report| report.plan.len()),
        seconds: steps.plans().iter().map(|report| report.time.as_secs_f64()).sum(),
        ..Found::default()
    })
}

/// Makes parameters that are made at their first use.
fn made<M: Module>(model: &M) {
    struct Touch;

    impl ModuleVisitor for Touch {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            drop(param.val());
        }
    }

    model.visit(&mut Touch);
}

/// The bytes of the pages of all pools.
fn reserved(device: &Device) -> anyhow::Result<u64> {
    let device = device.clone().inner();
    let DispatchDevice::Cube(cube) = device.as_dispatch() else { bail!("it is no GPU") };
    Ok(cube.client().memory_report(MemoryScope::Device).usage().bytes_reserved)
}
