//! Two ranks on two blank devices of different cards: each plans for its own, and neither exceeds
//! it, the exchange of gradients included.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use firebox::Bytes;
use firebox_blank::{Blank, Settings};
use firebox_testing::machine::device;
use libtest_mimic::{Failed, Trial};

use crate::child::{ENDED, Ended, Job, Pools};
use crate::trial::{LIMIT, card, ensure, test};

/// The cards, and the memory that is left of each.
const CARDS: [(&str, Bytes); 2] = [("T4", Bytes::mib(1000)), ("RTX 3070", Bytes::mib(500))];

/// What a rank has left.
struct Rank {
    blank: Blank,
    card: &'static str,
    free: Bytes,
    ended: Option<Ended>,
}

impl Rank {
    fn new((name, free): (&'static str, Bytes)) -> Result<Self, Failed> {
        let machine = Settings::new([device(&card(name)).leaving(free.get())]);
        Ok(Self { blank: Blank::install(&machine)?, card: name, free, ended: None })
    }

    fn file(&self) -> std::path::PathBuf {
        self.blank.folder().join("ended")
    }

    /// The arguments of `mpirun` for this rank: its own driver and kernels.
    fn add_to(&self, command: &mut Command, number: usize, job: &Job) -> Result<(), Failed> {
        let program = std::env::current_exe()?;
        // The second rank has one batch more than the first, which takes part without one.
        let batches = job.batches + number;
        let job = Job { kernels: self.blank.folder().join("kernels"), batches, ..job.clone() };
        let (name, value) = job.variable();
        command.args(["-n", "1"]);
        for (name, value) in self.blank.command(&program).get_envs() {
            if let Some(value) = value {
                let text = [name.to_string_lossy(), value.to_string_lossy()].join("=");
                command.args(["-x", &text]);
            }
        }
        command.args(["-x", &format!("{ENDED}={}", self.file().display())]);
        command.args(["-x", &format!("{name}={value}")]);
        command.arg(program);
        Ok(())
    }
}

/// Runs a job on all cards, one rank each.
fn run(job: &Job, folder: &Path) -> Result<(Vec<Rank>, String), Failed> {
    let mut ranks = CARDS.into_iter().map(Rank::new).collect::<Result<Vec<_>, _>>()?;
    let mut command = Command::new("mpirun");
    command.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]);
    for (number, rank) in ranks.iter().enumerate() {
        if number > 0 {
            command.arg(":");
        }
        rank.add_to(&mut command, number, job)?;
    }
    let output = folder.join("output");
    command.env("RUST_BACKTRACE", "0").env("RUST_MIN_STACK", "16777216").stdin(Stdio::null());
    command.stdout(std::fs::File::create(&output)?);
    command.stderr(std::fs::File::options().append(true).open(&output)?);
    let (mut child, began) = (command.spawn()?, Instant::now());
    while child.try_wait()?.is_none() {
        if began.elapsed() > LIMIT * 6 {
            child.kill()?;
            return Err("the ranks hang".into());
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    for rank in &mut ranks {
        let said = std::fs::read_to_string(rank.file()).unwrap_or_default();
        rank.ended = serde_json::from_str(&said).ok();
    }
    Ok((ranks, String::from_utf8_lossy(&std::fs::read(&output)?).into_owned()))
}

fn within(pools: Pools, model: &'static str, items: usize) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let kernels = folder.path().to_owned();
    let job =
        Job { pools, ranks: true, epochs: 3, validates: true, ..Job::new(model, items, kernels) };
    let (ranks, said) = run(&job, folder.path())?;
    let mut plans = Vec::new();
    for rank in &ranks {
        let complaint = |what: &str| Failed::from(format!("{what} on the {}:\n{said}", rank.card));
        let ended = rank.ended.as_ref().ok_or_else(|| complaint("nothing was said"))?;
        ensure(ended.error.is_none(), || complaint(&format!("{:?}", ended.error)))?;
        let books = rank.blank.books()?;
        let peak = books.iter().filter(|books| books.devices() > 0).map(|of| of.device(0).peak());
        let peak = Bytes::new(peak.max().unwrap_or_default());
        let refused: u64 = books.iter().map(|books| books.device(0).refused()).sum();
        let predicted = ended.predicted.ok_or_else(|| complaint("nothing was predicted"))?;
        let plan = ended.plan.clone().unwrap_or_default();
        println!(
            "{model} on the {}: {plan}, predicted {predicted}, the driver gave {peak} of {}",
            rank.card, rank.free
        );
        ensure(peak <= rank.free && refused == 0, || complaint("more than there is"))?;
        ensure(peak > Bytes::ZERO && predicted >= peak, || complaint("more than predicted"))?;
        if pools == Pools::Ours {
            ensure(predicted == peak, || complaint("the prediction is not exact"))?;
        }
        plans.push(plan);
    }
    ensure(plans[0] != plans[1], || format!("both have the plan {}", plans[0]).into())
}

pub fn tests() -> Vec<Trial> {
    let case = |pools: Pools, model: &'static str, items| {
        let name = format!("two_ranks_within_two_cards_{model}{}", pools.suffix());
        test(name, move || within(pools, model, items))
    };
    vec![
        case(Pools::Ours, "gpt", 300),
        case(Pools::Ours, "mlp", 3000).with_ignored_flag(true),
        case(Pools::Burns, "mlp", 3000),
    ]
}
