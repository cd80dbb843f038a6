//! Draws the picture of the README: the heap during one optimizer step, with the whole batch and in
//! micro-batches that fit a budget.
//!
//! ```text
//! cargo bench -p firebox-tests --bench picture              # prints the numbers
//! cargo bench -p firebox-tests --bench picture -- --write   # also draws docs/picture
//! ```
//!
//! A counting allocator measures, and a thread samples it.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use burn::backend::{Autodiff, Flex};
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataset::InMemDataset;
use burn::optim::AdamConfig;
use burn::tensor::backend::Backend;
use burn::train::SupervisedTraining;
use firebox::{Bytes, Lazy, Learner};
use firebox_testing::bench;
use firebox_testing::bench::renderer::BatchEnds;
use firebox_testing::zoo::{self, Numbered, Zoo};
use peak_alloc::PeakAlloc;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

type B = Autodiff<Lazy<Flex>>;
type Model<B> = zoo::Cnn<B>;

/// Images of one optimizer step.
const ITEMS: usize = 1024;
/// The budget of the run in micro-batches, as a share of what the whole batch needs.
const SHARE: f64 = 0.25;
/// Optimizer steps, of which the first do not count.
const STEPS: usize = 9;
const WARM_UP: usize = 3;
/// How often the heap is looked at.
const EVERY: Duration = Duration::from_micros(250);
/// Points of a curve.
const POINTS: usize = 400;

/// What a run showed.
struct Drawn {
    micro_batches: usize,
    predicted: Bytes,
    /// The most that the heap held in all steps that count.
    peak: Bytes,
    /// The median time of a step.
    time: Duration,
    /// One step: time since it began, and bytes.
    curve: Vec<(Duration, Bytes)>,
}

/// Trains with a budget and looks at the heap meanwhile.
fn run(budget: Bytes) -> anyhow::Result<Drawn> {
    let device = Default::default();
    B::seed(&device, 1);
    let before = HEAP.current_usage();
    let model = Model::<B>::new(&device);
    let numbers = |count| InMemDataset::new((0..count).collect::<Vec<usize>>());
    let train = DataLoaderBuilder::<B, _, _>::new(Numbered::<Model<B>>::default())
        .batch_size(ITEMS)
        .build(numbers(STEPS * ITEMS));
    let valid =
        DataLoaderBuilder::<Lazy<Flex>, _, _>::new(Numbered::<Model<Lazy<Flex>>>::default())
            .batch_size(ITEMS)
            .build(numbers(0));
    let (ends, folder) = (BatchEnds::default(), tempfile::tempdir()?);
    let training = SupervisedTraining::new(folder.path(), train, valid)
        .with_application_logger(None)
        .renderer(ends.renderer())
        .num_epochs(1);
    let learner = Learner::builder().auto_batch().memory(budget).quiet();
    let learner = learner.build(model, AdamConfig::new().init(), 1e-3);
    let over = AtomicBool::new(false);
    // No growth of the list itself is seen.
    let mut samples: Vec<(Instant, usize)> = Vec::with_capacity(1 << 20);
    let before = before + samples.capacity() * size_of::<(Instant, usize)>();
    let fitted = std::thread::scope(|scope| {
        let samples = &mut samples;
        let over = &over;
        let sampler = scope.spawn(move || {
            while !over.load(Relaxed) && samples.len() < samples.capacity() {
                samples.push((Instant::now(), HEAP.current_usage()));
                std::thread::sleep(EVERY);
            }
        });
        let fitted = learner.fit(training);
        over.store(true, Relaxed);
        sampler.join().expect("it does not panic");
        fitted
    })?;
    let ends = ends.get();
    anyhow::ensure!(ends.len() == STEPS, "{} steps were seen", ends.len());
    let mut counted: Vec<(Duration, usize)> =
        (WARM_UP..STEPS).map(|step| (ends[step] - ends[step - 1], step)).collect();
    counted.sort();
    let (time, step) = counted[counted.len() / 2];
    let bytes = |heap: usize| Bytes::new(heap.saturating_sub(before) as u64);
    let within = |from: Instant, to: Instant| {
        samples.iter().filter(move |(at, _)| *at >= from && *at < to).copied()
    };
    let all = within(ends[WARM_UP - 1], ends[STEPS - 1]).map(|(_, heap)| bytes(heap));
    let one = within(ends[step - 1], ends[step]);
    let report = fitted.report.expect("batches were trained on");
    Ok(Drawn {
        micro_batches: report.plan.len(),
        predicted: report.predicted(),
        peak: all.max().unwrap_or_default(),
        time,
        curve: one.map(|(at, heap)| (at - ends[step - 1], bytes(heap))).collect(),
    })
}

/// The colors of a picture.
struct Theme {
    name: &'static str,
    text: &'static str,
    faint: &'static str,
    whole: &'static str,
    parts: &'static str,
}

const THEMES: [Theme; 2] = [
    Theme { name: "light", text: "#1f2328", faint: "#d1d9e0", whole: "#8c959f", parts: "#bc4c00" },
    Theme { name: "dark", text: "#e6edf3", faint: "#3d444d", whole: "#9198a1", parts: "#f0883e" },
];

/// The frame of the curves in the picture, in pixels.
const LEFT: f64 = 64.0;
const TOP: f64 = 36.0;
const WIDTH: f64 = 660.0;
const HEIGHT: f64 = 210.0;

/// A picture of both runs.
fn svg(theme: &Theme, whole: &Drawn, parts: &Drawn, budget: Bytes) -> anyhow::Result<String> {
    let Theme { text, faint, .. } = theme;
    let longest = whole.time.max(parts.time).as_secs_f64();
    let largest = whole.peak.get() as f64 * 1.08;
    let x = |at: Duration| LEFT + at.as_secs_f64() / longest * WIDTH;
    let y = |bytes: Bytes| TOP + HEIGHT - bytes.get() as f64 / largest * HEIGHT;
    let mut svg = String::new();
    let (right, bottom) = (LEFT + WIDTH, TOP + HEIGHT);
    writeln!(
        svg,
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 300" font-family="system-ui, sans-serif" font-size="13">
<title>The heap during one optimizer step on {ITEMS} images</title>
<g fill="{text}"><text x="{LEFT}" y="18">Memory in use during one optimizer step on {ITEMS} images</text>"#,
    )?;
    let step = Bytes::mib(if largest > 400.0 * 1048576.0 { 100 } else { 50 });
    let mut at = Bytes::ZERO;
    while (at.get() as f64) < largest {
        let (y, label) = (y(at), at.get() >> 20);
        writeln!(
            svg,
            r#"<path d="M{LEFT} {y:.1}H{right}" stroke="{faint}"/><text x="{:.0}" y="{:.1}" text-anchor="end">{label} MiB</text>"#,
            LEFT - 6.0,
            y + 4.0
        )?;
        at += step;
    }
    let end = (longest * 1e3).round();
    writeln!(
        svg,
        r#"<text x="{LEFT}" y="{0}">0</text><text x="{right}" y="{0}" text-anchor="end">{end} ms</text></g>"#,
        bottom + 18.0
    )?;
    for (drawn, color) in [(whole, theme.whole), (parts, theme.parts)] {
        let mut path = format!("M{LEFT:.1} {bottom:.1}");
        for points in drawn.curve.chunks(drawn.curve.len().div_ceil(POINTS).max(1)) {
            // The largest of several points, so that no peak is lost.
            let most = points.iter().map(|(_, bytes)| *bytes).max().unwrap_or_default();
            write!(path, "L{:.1} {:.1}", x(points[0].0), y(most))?;
        }
        let last = x(drawn.time);
        writeln!(
            svg,
            r#"<path d="{path}L{last:.1} {bottom:.1}Z" fill="{color}" fill-opacity=".35" stroke="{color}" stroke-linejoin="round"/>"#
        )?;
    }
    let line = y(budget);
    writeln!(
        svg,
        r#"<path d="M{LEFT} {line:.1}H{right}" stroke="{text}" stroke-dasharray="5 4"/><text x="{right}" y="{:.1}" text-anchor="end" fill="{text}">budget {budget}</text>"#,
        line - 6.0
    )?;
    for (row, drawn, color) in [(0.0, whole, theme.whole), (1.0, parts, theme.parts)] {
        let what = match drawn.micro_batches {
            1 => "whole batch".to_owned(),
            count => format!("{count} micro-batches"),
        };
        let (peak, time) = (drawn.peak, drawn.time.as_millis());
        let (x, y) = (LEFT + 330.0 * row, bottom + 42.0);
        writeln!(
            svg,
            r#"<rect x="{x}" y="{}" width="12" height="12" fill="{color}" fill-opacity=".6"/><text x="{}" y="{y}" fill="{text}">{what}: {peak} at the peak, {time} ms</text>"#,
            y - 11.0,
            x + 18.0
        )?;
    }
    svg += "</svg>\n";
    Ok(svg)
}

fn main() -> anyhow::Result<()> {
    bench::print_machine();
    let whole = run(Bytes::mib(16 * 1024))?;
    let budget = Bytes::mib((whole.predicted.scale(SHARE).get() >> 20).next_multiple_of(8));
    let parts = run(budget)?;
    anyhow::ensure!(whole.micro_batches == 1 && parts.micro_batches > 1, "the budget splits");
    println!("\na CNN on {ITEMS} images, Flex, budget {budget}");
    for drawn in [&whole, &parts] {
        let Drawn { micro_batches, predicted, peak, time, .. } = drawn;
        println!("  {micro_batches:>2} parts  predicted {predicted}  peak {peak}  step {time:.0?}");
    }
    let ratio = parts.time.as_secs_f64() / whole.time.as_secs_f64();
    println!(
        "result: bench=picture peak_ratio={:.3} time_ratio={ratio:.3}",
        parts.peak.ratio(whole.peak)
    );
    if std::env::args().any(|argument| argument == "--write") {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/picture");
        std::fs::create_dir_all(folder)?;
        for theme in &THEMES {
            let path = format!("{folder}/memory-{}.svg", theme.name);
            std::fs::write(&path, svg(theme, &whole, &parts, budget)?)?;
            println!("wrote {path}");
        }
    }
    Ok(())
}
