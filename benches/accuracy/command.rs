//! The command line: runs all cases in child processes, a few of them as a test, or one of them in
//! this process.

use std::io::{Read, Seek};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use clap::Parser;
use firebox::Bytes;
use firebox_blank::Settings;
use firebox_dry::{Capability, Card};
use firebox_testing::machine::{self, Machine};
use indicatif::{ProgressBar, ProgressStyle};

use crate::backend::{BENCH, CAN_BE_BLANK, LIMITS};
use crate::cases::{CASES, Case, FEW};
use crate::comparison::{Compared, Comparison};
use crate::process::{self, Found, Setup};
use crate::target;

/// Compares predicted with measured memory on the first device, for every model of the zoo.
#[derive(Parser)]
#[command(name = "accuracy")]
struct Options {
    /// Fresh processes per case. What a GPU reserves depends on how threads happen to interleave.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    processes: u64,
    /// Processes that run at the same time. Rare thread interleavings are more frequent on a busy
    /// machine.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    jobs: u64,
    /// Starts no process after this many seconds. Every case gets its first process before any gets
    /// its second.
    #[arg(long, value_name = "SECONDS")]
    limit: Option<u64>,
    /// Runs only the cases whose names contain this text.
    #[arg(long, default_value = "", hide_default_value = true)]
    cases: String,
    /// Runs this case, which need not be in the list: `--case gpt-230`, `--case cnn-420-by-140`.
    /// Can be given several times.
    #[arg(long, value_name = "NAME", conflicts_with = "cases")]
    case: Vec<Case>,
    /// Runs everything on the blank driver, which computes nothing, as this card: `--card T4,4090`.
    /// This is the default on CUDA without an NVIDIA device, with the four cards of the record.
    /// `sm_100` stands for a card of that capability with 80 GiB.
    #[arg(long, value_name = "CARD", value_delimiter = ',', value_parser = card)]
    card: Vec<Card>,
    /// Tunes anew in each process instead of keeping the choices of earlier ones.
    #[arg(long)]
    tune: bool,
    /// Keeps the programs compiled on the blank driver in this folder, with a subfolder for each
    /// card. Used by `benches/kernels.py`.
    #[arg(long, value_name = "FOLDER")]
    sources: Option<PathBuf>,
    #[command(flatten)]
    setup: Setup,
    /// Lists the cases without running any.
    #[arg(long)]
    list: bool,
    /// Writes all numbers to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Predicts what a step of a model reserves at these batch sizes, without running it:
    /// `--scan cnn 200 300 10`.
    #[arg(long, num_args = 4, value_names = ["MODEL", "FROM", "TO", "STEP"])]
    scan: Option<Vec<String>>,
    /// Runs one case in this process.
    #[arg(long, hide = true)]
    process: Option<Case>,
    /// Folder for compiled kernels and tuned choices during the run.
    #[arg(long, hide = true)]
    kernels: Option<PathBuf>,
    /// With `--process`, also measures the bytes in use after a step.
    #[arg(long, hide = true)]
    left: bool,
    /// Prints the name of the device.
    #[arg(long, hide = true)]
    probe: bool,
    /// Passed by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Processes per case in a test.
const FEW_PROCESSES: u64 = 1;
/// Default cards on the blank driver: one of each generation.
const CARDS: [&str; 4] = ["T4", "RTX 3070", "RTX 4090", "H100 80GB"];
/// Time limit of one process.
const PATIENCE: Duration = Duration::from_secs(900);

/// Compute capabilities that `--card` accepts as names of cards.
const CAPABILITIES: [(&str, Capability); 7] = [
    ("sm_75", Capability::new(7, 5)),
    ("sm_80", Capability::new(8, 0)),
    ("sm_86", Capability::new(8, 6)),
    ("sm_89", Capability::new(8, 9)),
    ("sm_90", Capability::new(9, 0)),
    ("sm_100", Capability::new(10, 0)),
    ("sm_120", Capability::new(12, 0)),
];

/// Finds a card of the table, or makes one of a capability such as `sm_100`.
fn card(name: &str) -> Result<Card, String> {
    let capability = CAPABILITIES.iter().find(|(known, _)| *known == name);
    let any =
        |(name, capability): &(&'static str, _)| Card::new(name, Bytes::gib(80), *capability, 132);
    let card = capability.map(any).or_else(|| Card::named(name));
    card.ok_or_else(|| format!("no card of the table is called `{name}`"))
}

/// The machines that the cases run on.
struct Target {
    name: String,
    machines: Vec<Machine>,
}

impl Target {
    /// Chooses the cards in `cards`, else the real device, else the default cards.
    fn find(cards: &[Card], sources: Option<&Path>) -> anyhow::Result<Option<Self>> {
        if cards.is_empty()
            && let Some(name) = device()
        {
            return Ok(Some(Self { name, machines: vec![Machine::Here] }));
        }
        if !CAN_BE_BLANK {
            ensure!(
                cards.is_empty() && sources.is_none(),
                "the blank driver stands in for CUDA: run the bench `accuracy_cuda`"
            );
            return Ok(None);
        }
        let usual: Vec<Card> = CARDS.iter().filter_map(|name| Card::named(name)).collect();
        let cards = if cards.is_empty() { &usual } else { cards };
        let machine = |card: &Card| {
            let mut settings = Settings::new([machine::device(card)]);
            settings.sources = sources.map(|folder| folder.join(card.name().replace(' ', "-")));
            Machine::with(card.name(), &settings)
        };
        let machines = cards.iter().map(machine).collect::<Result<_, _>>()?;
        Ok(Some(Self { name: "cuda-blank".to_owned(), machines }))
    }
}

/// Settings of a comparison.
struct Runs<'a> {
    target: &'a Target,
    pairs: &'a [(&'a Machine, Case)],
    /// Arguments of the setup.
    setup: Vec<String>,
    processes: u64,
    jobs: u64,
    /// Whether each process tunes for itself.
    tune: bool,
}

/// Runs the command line.
pub fn run() -> anyhow::Result<()> {
    // `cargo test` passes its own arguments but not `--bench`.
    if !std::env::args().any(|argument| argument == "--bench") {
        return test();
    }
    let options = Options::parse();
    if let Some(case) = &options.process {
        if let Some(folder) = &options.kernels {
            target::keep_kernels(folder);
        }
        println!("{}", process::run(case, options.setup, options.left)?.line()?);
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
    let target = Target::find(&options.card, options.sources.as_deref())?
        .context("there is no device to measure on; install a driver, or Mesa's lavapipe")?;
    let started = Instant::now();
    let limit = options.limit.map(Duration::from_secs);
    let is_over = || limit.is_some_and(|limit| started.elapsed() >= limit);
    let setup = options.setup.arguments();
    let (processes, jobs, tune) = (options.processes, options.jobs, options.tune);
    let on = |machine| cases.iter().map(move |case| (machine, *case));
    let pairs: Vec<_> = target.machines.iter().flat_map(on).collect();
    let runs = Runs { target: &target, pairs: &pairs, setup, processes, jobs, tune };
    let comparison = runs.compare(is_over)?;
    println!("{}", comparison.table());
    if let Some(file) = &options.json {
        let text = serde_json::to_string_pretty(&comparison.json())?;
        std::fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))?;
    }
    let in_use = comparison.cases.iter().filter(|case| case.in_use_is_exact()).count();
    let measured = comparison.cases.iter().map(|case| case.found.len());
    let (processes, compared) = (measured.clone().sum::<usize>(), measured.len());
    println!("bytes in use after a step are as predicted in {in_use} of {compared} cases");
    let asked = pairs.len() as u64 * options.processes;
    println!("{processes} processes, {asked} were asked for");
    println!("{comparison}");
    Ok(())
}

/// Runs a few cases and checks the limits, unless `cargo test` asked for other tests.
fn test() -> anyhow::Result<()> {
    let names: Vec<String> =
        std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    if !names.is_empty() && !names.iter().any(|name| BENCH.contains(name.as_str())) {
        println!("not run: {BENCH} (other tests were asked for)");
        return Ok(());
    }
    let Some(target) = Target::find(&[], None)? else {
        anyhow::bail!("there is no device for {BENCH}");
    };
    let is_blank = target.machines.iter().any(|machine| machine.card().is_some());
    if is_blank {
        println!("there is no NVIDIA device: run on the blank driver, which computes nothing");
    }
    let mut pairs = Vec::new();
    for (case, card) in FEW {
        let is_its = |machine: &&Machine| machine.card().is_none_or(|name| name == *card);
        let machine = target.machines.iter().find(is_its).context("no machine has this card")?;
        pairs.push((machine, case.parse()?));
    }
    let (target, pairs, setup) = (&target, &pairs, Vec::new());
    let runs = Runs { target, pairs, setup, processes: FEW_PROCESSES, jobs: 2, tune: false };
    let comparison = runs.compare(|| false)?;
    println!("{}\n{comparison}", comparison.table());
    for compared in &comparison.cases {
        let (case, ratio) = (compared.name(), compared.ratio());
        ensure!(LIMITS.contains(&ratio), "{case}: {ratio:.3} of what was measured was predicted");
        ensure!(
            compared.in_use_is_exact(),
            "{case}: other bytes than predicted are in use after a step"
        );
    }
    Ok(())
}

/// One process of a comparison.
struct Job<'a> {
    round: u64,
    machine: &'a Machine,
    case: &'a Case,
}

impl Runs<'_> {
    /// Runs every case on its machine in `processes` child processes, `jobs` of them at a time.
    /// Starts the first process of each case, then the second of each, until `is_over`.
    fn compare(&self, is_over: impl Fn() -> bool + Sync) -> anyhow::Result<Comparison> {
        let Self { target, pairs, processes, jobs, .. } = self;
        let count = pairs.len() as u64 * processes;
        let style = "{wide_bar} {pos}/{len} {msg} ({eta} left)";
        let bar = ProgressBar::new(count).with_style(ProgressStyle::with_template(style)?);
        let all = (0..*processes).flat_map(|round| {
            pairs.iter().map(move |(machine, case)| Job { round, machine, case })
        });
        let next = Mutex::new(all.take_while(|_| !is_over()).fuse());
        let next = || next.lock().unwrap_or_else(PoisonError::into_inner).next();
        let work = || -> anyhow::Result<Vec<(Option<String>, Case, Found)>> {
            // Processes that share a folder at the same time would disturb each other.
            let kernels = tempfile::tempdir()?;
            let mut found = Vec::new();
            while let Some(job) = next() {
                bar.set_message(job.case.to_string());
                let card = job.machine.card().map(str::to_owned);
                found.push((card, *job.case, self.measure(&job, kernels.path())?));
                bar.inc(1);
            }
            Ok(found)
        };
        let parts: anyhow::Result<Vec<_>> = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..*jobs).map(|_| scope.spawn(work)).collect();
            let ended =
                workers.into_iter().map(|worker| worker.join().expect("a job does not panic"));
            ended.collect()
        });
        bar.finish_and_clear();
        let all = parts?.concat();
        let compared = pairs.iter().map(|(machine, case)| {
            let card = machine.card().map(str::to_owned);
            let found = all.iter().filter(|(on, of, _)| of == case && *on == card);
            let found = found.map(|(_, _, found)| *found).collect();
            Compared { case: *case, card, found }
        });
        let cases: Vec<Compared> = compared.filter(|case| !case.found.is_empty()).collect();
        ensure!(!cases.is_empty(), "the time was over before a process began");
        Ok(Comparison { target: target.name.clone(), cases })
    }

    /// Runs a case in a child process.
    fn measure(&self, job: &Job, kernels: &Path) -> anyhow::Result<Found> {
        let Job { round, machine, case } = job;
        let name = case.to_string();
        // The tuner files its choices under the device's number, whatever the card.
        let folder = kernels.join(machine.card().unwrap_or("device"));
        if self.tune && folder.exists() {
            std::fs::remove_dir_all(&folder)?;
        }
        std::fs::create_dir_all(&folder)?;
        let folder = folder.display().to_string();
        let mut arguments = vec!["--process", &name, "--kernels", &folder];
        arguments.extend((*round == 0).then_some("--left"));
        arguments.extend(self.setup.iter().map(String::as_str));
        let output = itself(machine, &arguments)?;
        Found::parse(&output).with_context(|| format!("{case} found nothing:\n{output}"))
    }
}

/// Name of the first device, if there is one. Asks in a child process, because asking without a
/// driver panics.
fn device() -> Option<String> {
    let output = itself(&Machine::Here, &["--probe"]).ok()?;
    let name = output.lines().find_map(|line| line.strip_prefix("device: "))?;
    Some(name.replace(' ', "-"))
}

/// Runs this program with `arguments` on `machine` and returns what it printed.
fn itself(machine: &Machine, arguments: &[&str]) -> anyhow::Result<String> {
    let mut command = machine.command(std::env::current_exe()?);
    let files = [tempfile::tempfile()?, tempfile::tempfile()?];
    command.args(arguments).arg("--bench");
    command.stdout(files[0].try_clone()?).stderr(files[1].try_clone()?);
    let mut child = command.spawn()?;
    let started = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if started.elapsed() > PATIENCE {
            child.kill()?;
            bail!("`{}` was ended after {} s", arguments.join(" "), PATIENCE.as_secs());
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let [text, error] = files.map(|mut file| -> anyhow::Result<String> {
        let mut bytes = Vec::new();
        file.rewind()?;
        file.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    });
    let (text, error) = (text?, error?);
    if !status.success() {
        let end = first_panic(&error).unwrap_or(&error);
        bail!("`{}` failed ({status}): {end}", arguments.join(" "));
    }
    Ok(text)
}

/// The place and message of a process's first panic. Later panics are consequences of it.
fn first_panic(error: &str) -> Option<&str> {
    let panic = &error[error.find("panicked at ")?..];
    let end = panic.match_indices('\n').nth(1).map_or(panic.len(), |(at, _)| at);
    Some(&panic[..end])
}

/// Prints the bytes that a step reserves by batch size, with one line per change.
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
