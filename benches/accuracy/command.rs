//! The command line: all cases in processes of their own, a few of them as a test, or one of them in this process.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use clap::Parser;
use firebox::Bytes;
use indicatif::{ProgressBar, ProgressStyle};

use crate::cases::{CASES, Case, FEW};
use crate::comparison::{Compared, Comparison};
use crate::process::{self, Found, Setup};
use crate::target;

/// Compares predicted with measured memory on the first device, for every model of the zoo.
#[derive(Parser)]
#[command(name = "accuracy")]
struct Options {
    /// How many fresh processes a case is run in. What a GPU reserves depends on how threads happen to interleave.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    processes: u64,
    /// How many processes are run beside each other. What threads do by chance they do more often on a busy machine.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    jobs: u64,
    /// Begins no process after so many seconds. Every case has its first process before any has its second.
    #[arg(long, value_name = "SECONDS")]
    limit: Option<u64>,
    /// Runs only the cases whose names contain this.
    #[arg(long, default_value = "", hide_default_value = true)]
    cases: String,
    /// Runs this case, which need not be in the list: `--case gpt-230`, `--case cnn-420-by-140`. Can be given several times.
    #[arg(long, value_name = "NAME", conflicts_with = "cases")]
    case: Vec<Case>,
    #[command(flatten)]
    setup: Setup,
    /// Lists the cases and runs none.
    #[arg(long)]
    list: bool,
    /// Writes all numbers to a file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Predicts what a step of a model reserves at these batch sizes, and runs none: `--scan cnn 200 300 10`.
    #[arg(long, num_args = 4, value_names = ["MODEL", "FROM", "TO", "STEP"])]
    scan: Option<Vec<String>>,
    /// Runs one case in this process.
    #[arg(long, hide = true)]
    process: Option<Case>,
    /// Where compiled kernels and tuned choices are kept meanwhile.
    #[arg(long, hide = true)]
    kernels: Option<PathBuf>,
    /// Measures there what is in use after a step, too.
    #[arg(long, hide = true)]
    left: bool,
    /// Says what the device is.
    #[arg(long, hide = true)]
    probe: bool,
    /// What `cargo bench` passes.
    #[arg(long, hide = true)]
    bench: bool,
}

/// What a prediction may be of the most that was measured, where the cases are run as a test.
const LIMITS: std::ops::RangeInclusive<f64> = 0.99..=1.10;
/// The processes of a case there.
const FEW_PROCESSES: u64 = 1;

/// Does what the command line asks for.
pub fn run() -> anyhow::Result<()> {
    // `cargo test` passes the arguments of its own harness, and not this one.
    if !std::env::args().any(|argument| argument == "--bench") {
        return test();
    }
    let options = Options::parse();
    if let Some(case) = &options.process {
        if let Some(folder) = &options.kernels {
            target::keep_kernels(folder);
        }
        println!("{}", process::run(case, options.setup, options.left)?);
        return Ok(());
    }
    if options.probe {
        println!("device: {}", target::name().context("there is no device")?);
        return Ok(());
    }
    if let Some(scan) = &options.scan {
        return self::scan(scan);
    }
    let listed = CASES.iter().copied().filter(|case| case.to_string().contains(&options.cases));
    let mut cases: Vec<Case> = Vec::new();
    let chosen = if options.case.is_empty() { listed.collect() } else { options.case };
    chosen.into_iter().for_each(|case| {
        if !cases.contains(&case) {
            cases.push(case);
        }
    });
    ensure!(!cases.is_empty(), "no case contains `{}`; `--list` names all", options.cases);
    if options.list {
        cases
            .iter()
            .for_each(|case| println!("{case}{}", if case.cliff { " (near a cliff)" } else { "" }));
        return Ok(());
    }
    let device = device()
        .context("there is no device to measure on; install a driver, or Mesa's lavapipe")?;
    let started = Instant::now();
    let limit = options.limit.map(Duration::from_secs);
    let is_over = || limit.is_some_and(|limit| started.elapsed() >= limit);
    let arguments = options.setup.arguments();
    let comparison = compare(device, &cases, &arguments, options.processes, options.jobs, is_over)?;
    println!("{}", comparison.table());
    if let Some(file) = &options.json {
        let text = serde_json::to_string_pretty(&comparison.json())?;
        std::fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))?;
    }
    let in_use = comparison.cases.iter().filter(|case| case.in_use_is_exact()).count();
    let measured = comparison.cases.iter().map(|case| case.found.len());
    let (processes, compared) = (measured.clone().sum::<usize>(), measured.len());
    println!("bytes in use after a step are as predicted in {in_use} of {compared} cases");
    println!("{processes} processes, {} were asked for", cases.len() as u64 * options.processes);
    println!("{comparison}");
    Ok(())
}

/// Runs a few cases and holds them to the limits, unless `cargo test` was asked for something else.
fn test() -> anyhow::Result<()> {
    let names: Vec<String> =
        std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    if !names.is_empty() && !names.iter().any(|name| "accuracy".contains(name.as_str())) {
        println!("not run: accuracy (other tests were asked for)");
        return Ok(());
    }
    let Some(device) = device() else {
        println!("not run: accuracy of {} (no device)", FEW.join(", "));
        return Ok(());
    };
    let cases: Vec<Case> = FEW.iter().map(|name| name.parse()).collect::<anyhow::Result<_>>()?;
    let comparison = compare(device, &cases, &[], FEW_PROCESSES, 1, || false)?;
    println!("{}\n{comparison}", comparison.table());
    for compared in &comparison.cases {
        let (case, ratio) = (compared.case, compared.ratio());
        ensure!(LIMITS.contains(&ratio), "{case}: {ratio:.3} of what was measured was predicted");
        ensure!(
            compared.in_use_is_exact(),
            "{case}: other bytes than predicted are in use after a step"
        );
    }
    Ok(())
}

/// Runs every case in so many processes of its own with the arguments of `setup`, `jobs` beside each other: the first of each
/// case, then the second of each, until `is_over`.
fn compare(
    target: String,
    cases: &[Case],
    setup: &[String],
    processes: u64,
    jobs: u64,
    is_over: impl Fn() -> bool + Sync,
) -> anyhow::Result<Comparison> {
    let style = "{wide_bar} {pos}/{len} {msg} ({eta} left)";
    let bar = ProgressBar::new(cases.len() as u64 * processes)
        .with_style(ProgressStyle::with_template(style)?);
    let rounds = (0..processes).flat_map(|round| cases.iter().map(move |case| (round, case)));
    let next = Mutex::new(rounds.take_while(|_| !is_over()).fuse());
    let next = || next.lock().unwrap_or_else(PoisonError::into_inner).next();
    let run = || -> anyhow::Result<Vec<(Case, Found)>> {
        // Processes that share a folder at the same time would disturb each other.
        let kernels = tempfile::tempdir()?;
        let mut found = Vec::new();
        while let Some((round, case)) = next() {
            bar.set_message(case.to_string());
            found.push((*case, measure(case, setup, kernels.path(), round == 0)?));
            bar.inc(1);
        }
        Ok(found)
    };
    let parts: anyhow::Result<Vec<Vec<(Case, Found)>>> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..jobs).map(|_| scope.spawn(run)).collect();
        let ended = workers.into_iter().map(|worker| worker.join().expect("a job does not panic"));
        ended.collect()
    });
    bar.finish_and_clear();
    let all = parts?.concat();
    let compared = cases.iter().map(|case| {
        let found = all.iter().filter(|(of, _)| of == case).map(|(_, found)| *found);
        Compared { case: *case, found: found.collect() }
    });
    let cases: Vec<Compared> = compared.filter(|case| !case.found.is_empty()).collect();
    ensure!(!cases.is_empty(), "the time was over before a process began");
    Ok(Comparison { target, cases })
}

/// Runs a case in a process of its own.
fn measure(case: &Case, setup: &[String], kernels: &Path, left: bool) -> anyhow::Result<Found> {
    let name = case.to_string();
    let kernels = kernels.display().to_string();
    let mut arguments = vec!["--process", &name, "--kernels", &kernels];
    arguments.extend(left.then_some("--left"));
    arguments.extend(setup.iter().map(String::as_str));
    let output = itself(&arguments)?;
    Found::parse(&output).with_context(|| format!("{case} found nothing:\n{output}"))
}

/// What the first device is, if there is one. Asked in another process: without a driver, asking panics.
fn device() -> Option<String> {
    let output = itself(&["--probe"]).ok()?;
    let name = output.lines().find_map(|line| line.strip_prefix("device: "))?;
    Some(name.replace(' ', "-"))
}

/// Runs this program with these arguments; gives what it printed.
fn itself(arguments: &[&str]) -> anyhow::Result<String> {
    let mut command = Command::new(std::env::current_exe()?);
    let output = command.args(arguments).arg("--bench").env("RUST_BACKTRACE", "0").output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        let end = first_panic(&error).unwrap_or(&error);
        bail!("`{}` failed ({}): {end}", arguments.join(" "), output.status);
    }
    Ok(text)
}

/// The first panic of a process, place and message: those that follow are its consequences.
fn first_panic(error: &str) -> Option<&str> {
    let panic = &error[error.find("panicked at ")?..];
    let end = panic.match_indices('\n').nth(1).map_or(panic.len(), |(at, _)| at);
    Some(&panic[..end])
}

/// Prints what a step reserves by the items of its batch, a line where that changes.
fn scan(arguments: &[String]) -> anyhow::Result<()> {
    let [model, from, to, step] = arguments else { bail!("`--scan` takes four values") };
    let number = |text: &String| {
        text.parse::<usize>().with_context(|| format!("`{text}` is not a number of items"))
    };
    let (from, to, step) = (number(from)?, number(to)?, number(step)?.max(1));
    let mut last = Bytes::ZERO;
    for items in (from..=to).step_by(step) {
        let bytes = process::predict(model, items)?;
        if bytes != last {
            println!("{model} from {items} items on: {bytes}");
            last = bytes;
        }
    }
    Ok(())
}
