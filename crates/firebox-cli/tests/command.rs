//! Runs the command as a user does: what it prints and writes, and how it ends.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use burn::backend::{Autodiff, Flex};
use burn::module::AutodiffModule;
use burn::optim::AdamConfig;
use burn::train::{InferenceStep, TrainStep};
use firebox::{Lazy, Learner, MicroBatch};
use firebox_testing::zoo::{self, Zoo};
use serde_json::Value;
use tempfile::TempDir;

type B = Autodiff<Lazy<Flex>>;

/// Traces, saved once for all tests.
struct Files {
    folder: TempDir,
}

impl Files {
    fn get() -> &'static Self {
        static FILES: OnceLock<Files> = OnceLock::new();
        FILES.get_or_init(|| {
            let folder = tempfile::tempdir().expect("a folder for files");
            save::<zoo::Mlp<B>>(24, &folder.path().join("mlp.trace"));
            // Whole batches need no more items.
            save::<zoo::Autoencoder<B>>(4, &folder.path().join("autoencoder.trace"));
            save::<zoo::Cnn<B>>(24, &folder.path().join("cnn.trace"));
            Self { folder }
        })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

fn save<M>(items: usize, path: &Path)
where
    M: Zoo<B> + TrainStep<Input = <M as Zoo<B>>::Batch> + std::fmt::Display + 'static,
    M: AutodiffModule<B, InnerModule: InferenceStep<Input: MicroBatch>>,
{
    let device = Default::default();
    let builder = Learner::builder().auto_batch();
    let learner = builder.build(M::new(&device), AdamConfig::new().init(), 1e-3);
    let batch = M::batch(&(0..items).collect::<Vec<_>>(), &device);
    learner.trace(&batch).expect("it follows rules").save(path).expect("the folder is there");
}

/// Runs the command, in which the names of the two traces stand for their files.
fn firebox(arguments: &str) -> Output {
    let files = Files::get();
    let arguments = arguments.split_whitespace().map(|argument| match argument {
        file if file.contains(".trace") || file.starts_with("out.") => files.path(file).into(),
        other => std::ffi::OsString::from(other),
    });
    let mut command = Command::new(env!("CARGO_BIN_EXE_firebox"));
    command.args(arguments).output().expect("the command starts")
}

#[track_caller]
fn text(output: &Output, code: i32) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert_eq!(output.status.code(), Some(code), "{out}{err}");
    if code == 0 || code == 3 { out.into_owned() } else { err.into_owned() }
}

#[test]
fn a_plan_for_two_cards() {
    let out = text(&firebox("plan mlp.trace --batch 4096 --card t4 --card rtx-4090 --advise"), 0);
    assert!(out.contains("1 x 4096") && out.contains("RTX 4090"), "{out}");
    assert!(out.contains("less with SGD without momentum"), "{out}");
}

#[test]
fn a_plan_as_json_and_what_does_not_fit() {
    let json = |arguments: &str, code: i32| -> Value {
        serde_json::from_str(&text(&firebox(arguments), code)).expect("JSON")
    };
    let whole = json("plan mlp.trace --batch 4096 --card t4 --json", 0);
    let plan = &whole["plans"][0];
    assert_eq!((plan["fits"].as_bool(), plan["micro_batches"].as_u64()), (Some(true), Some(1)));
    let peak = plan["peak"].as_u64().expect("bytes");
    assert!(peak > plan["categories"]["parameters"].as_u64().expect("bytes"));
    let split = json("plan mlp.trace --batch 4096 --card t4 --micro-batch 512 --json", 0);
    assert_eq!(split["plans"][0]["split"], "8 x 512");
    assert!(split["plans"][0]["peak"].as_u64().expect("bytes") < peak);
    let none = json("plan mlp.trace --batch 4096 --card t4 --memory 20KiB --json", 3);
    assert_eq!(none["plans"][0]["fits"], false);
    let message = none["plans"][0]["message"].as_str().expect("a text");
    assert!(message.contains("one item needs"), "{message}");
    let none = text(&firebox("plan mlp.trace --batch 4096 --memory 20KiB"), 3);
    assert_eq!(none.matches("one item needs").count(), 1, "once for all cards: {none}");
}

#[test]
fn the_largest_batch_is_one_that_fits() {
    let out = text(&firebox("largest mlp.trace --card t4 --memory 64MiB --json"), 0);
    let found: Value = serde_json::from_str(&out).expect("JSON");
    let items = found["devices"][0]["batch"].as_u64().expect("a number");
    assert!(items > 0);
    for (items, split) in [(items, "1 x"), (items + 1, "+")] {
        let plan = format!("plan mlp.trace --batch {items} --card t4 --memory 64MiB");
        let output = firebox(&plan);
        let whole = String::from_utf8_lossy(&output.stdout).contains(&format!("1 x {items}"));
        assert_eq!(whole, split == "1 x", "{items}");
    }
}

#[test]
fn absurd_sizes_are_answered_at_once() {
    let within = |seconds: u64, arguments: &str, code: i32| -> String {
        let started = Instant::now();
        let out = text(&firebox(arguments), code);
        let took = started.elapsed();
        assert!(took < Duration::from_secs(seconds), "`{arguments}` took {took:?}");
        out
    };
    let small = within(10, "plan mlp.trace --batch 1024 --card t4 --memory 1B", 3);
    assert!(small.contains("one item needs at least"), "{small}");
    let huge = "plan mlp.trace --card t4 --batch";
    within(10, &format!("{huge} 100000000"), 3);
    within(10, &format!("{huge} 100000000 --memory 900TiB"), 3);
    within(10, &format!("{huge} 1000000000000"), 3);
    let whole = within(10, &format!("{huge} 1000000000000 --micro-batch 1000000000000"), 3);
    assert!(whole.contains("does not fit"), "{whole}");
    let none = within(10, &format!("{huge} 18446744073709551615"), 3);
    assert!(none.contains("more memory than any device has"), "{none}");
    within(10, "largest mlp.trace --card rtx-4090 --card h100", 0);
    within(10, "diff mlp.trace mlp.trace --batch 1000000000000 --card t4", 3);
    let more = "plan mlp.trace --batch 4 --card t4 --memory 99999999999999999999GiB";
    assert!(text(&firebox(more), 2).contains("more memory than can be counted"));
}

#[test]
fn parked_state_is_planned() {
    let plan = |more: &str| {
        let out =
            firebox(&format!("plan mlp.trace --batch 2000 --card cpu --memory 2GiB --json {more}"));
        serde_json::from_str::<Value>(&text(&out, 0)).expect("JSON")["plans"][0].clone()
    };
    let (usual, parked) = (plan(""), plan("--park"));
    let bytes = |plan: &Value, name: &str| plan[name].as_u64();
    assert!(bytes(&usual, "parked").is_none() && bytes(&parked, "parked") > Some(0), "{parked}");
    assert!(bytes(&parked, "peak") < bytes(&usual, "peak"), "{parked} {usual}");
    let table = text(&firebox("plan mlp.trace --batch 2000 --card cpu --memory 2GiB --park"), 0);
    assert!(table.contains(" parked"), "{table}");
    let largest = text(&firebox("largest mlp.trace --card cpu --memory 64MiB --park"), 0);
    assert!(largest.contains("not split, optimizer state parked"), "{largest}");
}

#[test]
fn a_trace_of_few_items_tells_the_largest_batch() {
    let out = text(&firebox("largest autoencoder.trace --card t4 --memory 256MiB --json"), 0);
    let found: Value = serde_json::from_str(&out).expect("JSON");
    assert!(found["devices"][0]["batch"].as_u64().expect("a number") > 4, "{out}");
}

#[test]
fn wrong_uses_say_what_is_wrong() {
    let wrong = text(&firebox("plan mlp.trace --batch 4 --card gtx-titan"), 2);
    assert!(
        wrong.contains("no card is called `gtx-titan`") && wrong.contains("RTX 4090"),
        "{wrong}"
    );
    assert!(text(&firebox("plan none.trace --batch 4"), 1).contains("cannot be read"));
    assert!(text(&firebox("plan mlp.trace --batch 0"), 2).contains("at least one item"));
    assert!(text(&firebox("report mlp.trace --batch 4 --card t4 -o out.pdf"), 2).contains(".html"));
    let small = text(&firebox("plan autoencoder.trace --batch 40 --card t4 --micro-batch 9"), 1);
    assert!(small.contains("recorded on a batch of 4 items"), "{small}");
    let files = Files::get();
    let bytes = std::fs::read(files.path("mlp.trace")).expect("it was saved");
    std::fs::write(files.path("cut.trace"), &bytes[..bytes.len() / 2])
        .expect("the folder is there");
    assert!(text(&firebox("show cut.trace"), 1).contains("incomplete"));
    std::fs::write(files.path("text.trace"), "nothing").expect("the folder is there");
    assert!(text(&firebox("show text.trace"), 1).contains("no trace of firebox"));
}

#[test]
fn what_a_trace_shows_of_splits_is_said() {
    assert!(text(&firebox("show mlp.trace"), 0).contains("splits      exact: a mean over items"));
    let cnn = text(&firebox("show cnn.trace"), 0);
    assert!(cnn.contains("splits      not exact: items meet in `float_sub` behind `norm"), "{cnn}");
}

#[test]
fn a_difference_is_by_module() {
    let same = text(&firebox("diff mlp.trace mlp.trace --batch 64 --card t4"), 0);
    assert!(same.contains("every module takes as many operations as before"), "{same}");
    let out = text(&firebox("diff mlp.trace autoencoder.trace --batch 64 --card t4"), 0);
    assert!(out.contains("operations before") && out.contains("peak"), "{out}");
}

#[test]
fn pictures_are_written() {
    let files = Files::get();
    for (name, begin) in [("svg", &b"<svg"[..]), ("png", b"\x89PNG"), ("json", b"{")] {
        let report = format!("report autoencoder.trace --batch 512 --card t4 -o out.{name}");
        text(&firebox(&report), 0);
        let bytes = std::fs::read(files.path(&format!("out.{name}"))).expect("it was written");
        assert!(bytes.starts_with(begin), "{name}");
    }
    let events = std::fs::read(files.path("out.json")).expect("it was written");
    let events: Value = serde_json::from_slice(&events).expect("JSON");
    let events = events["traceEvents"].as_array().expect("a list");
    let counters = events.iter().filter(|event| event["ph"] == "C").count();
    assert!(counters > 10, "{counters}");
}

/// The page tests itself in a browser: sorts, filters, zooms, and compares what it shows with its
/// data.
#[test]
#[ignore = "needs chromium"]
fn a_page_works_in_a_browser() {
    let report = "report autoencoder.trace --batch 512 --card t4 --card rtx-3070 -o out.html";
    text(&firebox(report), 0);
    let page = Files::get().path("out.html");
    let html = std::fs::read_to_string(&page).expect("it was written");
    assert!(html.len() < 2 << 20, "{} bytes", html.len());
    assert!(!html.contains("src=\"http") && !html.contains("href=\"http"), "it loads something");
    let mut chromium = Command::new("chromium");
    chromium.args(["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]);
    chromium.args(["--virtual-time-budget=60000"]);
    chromium.arg(format!("file://{}#selftest", page.display()));
    let output = chromium.output().expect("chromium is installed");
    let dom = String::from_utf8_lossy(&output.stdout);
    let head = dom.lines().find(|line| line.contains("<html")).unwrap_or_default();
    assert!(head.contains("data-selftest=\"ok\""), "{head}");
    assert!(!head.contains("data-error"), "{head}");
}

#[test]
fn help_teaches() {
    for command in ["--help", "plan --help", "report --help"] {
        let help = text(&firebox(command), 0);
        assert!(help.contains("Examples:"), "{help}");
    }
    assert!(text(&firebox("cards"), 0).contains("H100"));
}
