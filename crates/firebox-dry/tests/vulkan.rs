//! Predictions against a Vulkan device, real or software. Every case runs in fresh processes,
//! because pages stay with a process.

mod programs;

use std::process::Command;

use burn::backend::{Autodiff, Flex};
use burn::tensor::DType;
use burn::tensor::backend::Backend;
use burn_cubecl::CubeBackend;
use burn_fusion::Fusion;
use cubecl::Runtime;
use cubecl::wgpu::{WgpuDevice, WgpuRuntime};
use firebox_dry::Dry;
use firebox_lazy::Lazy;
use firebox_trace::{Bytes, Footprint, Trace};

use crate::programs::{Classifier, Language, Perceptron, Task, train};

type Vulkan = Fusion<CubeBackend<WgpuRuntime, f32, i32, u8>>;
type Training = Autodiff<Lazy<Vulkan>>;
type Rehearsing = Autodiff<Lazy<Flex>>;

const CASES: [(&str, usize); 5] = [
    ("classifier", 64),
    ("classifier", 700),
    ("language", 40),
    ("perceptron", 100),
    ("perceptron", 1500),
];

/// Fresh processes per case. What a real device reserves depends on how its threads happen to
/// interleave.
const PROCESSES: usize = 2;

/// What a process measured.
struct Measured {
    reserved: Bytes,
    in_use: Bytes,
}

/// Not a test of its own: the process in which a case is measured.
#[test]
#[ignore = "run by the other test"]
fn measured_process() {
    let variable = |name| std::env::var(name).expect("the other test says what to run");
    let items = variable("ITEMS").parse().expect("a number");
    fn run<M: Task<Training> + burn::module::AutodiffModule<Training>>(items: usize) {
        let device = WgpuDevice::default();
        let model = M::new(&device);
        Vulkan::sync(&device).expect("the device is healthy");
        train::<Training, M>(&model, items, &device);
        Vulkan::sync(&device).expect("the device is healthy");
        let usage = WgpuRuntime::client(&device).memory_usage().expect("the device is healthy");
        println!("measured: {} {}", usage.bytes_reserved, usage.bytes_in_use);
    }
    match variable("MODEL").as_str() {
        "classifier" => run::<Classifier<Training>>(items),
        "language" => run::<Language<Training>>(items),
        "perceptron" => run::<Perceptron<Training>>(items),
        other => panic!("no model `{other}`"),
    }
}

fn measure(model: &str, items: usize) -> Measured {
    let output = Command::new(std::env::current_exe().expect("this test is a program"))
        .args(["--ignored", "--exact", "measured_process", "--nocapture"])
        .env("MODEL", model)
        .env("ITEMS", items.to_string())
        .output()
        .expect("the test runs again");
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().find_map(|line| line.split("measured: ").nth(1));
    let line = line.unwrap_or_else(|| panic!("{text}{}", String::from_utf8_lossy(&output.stderr)));
    let mut numbers = line.split(' ').map(|number| number.parse().expect("a number"));
    let mut next = || Bytes::new(numbers.next().expect("two numbers"));
    Measured { reserved: next(), in_use: next() }
}

fn recorded(model: &str, items: usize) -> Trace {
    let device = Default::default();
    match model {
        "classifier" => programs::record::<Flex, Classifier<Rehearsing>>(items, &device),
        "language" => programs::record::<Flex, Language<Rehearsing>>(items, &device),
        _ => programs::record::<Flex, Perceptron<Rehearsing>>(items, &device),
    }
}

#[test]
fn predictions_are_what_fresh_processes_reserve() {
    let properties = WgpuRuntime::client(&WgpuDevice::default()).properties().clone();
    let dry = Dry::<Vulkan>::new(properties).with_traces_of_ints(DType::I64);
    for (model, items) in CASES {
        let footprint: Footprint = dry.replay(&recorded(model, items)).expect("the trace runs");
        let runs: Vec<Measured> = std::thread::scope(|scope| {
            let runs = [(); PROCESSES].map(|()| scope.spawn(|| measure(model, items)));
            runs.into_iter().map(|run| run.join().expect("it measured")).collect()
        });
        let last = footprint.timeline.last().expect("the trace has steps").live;
        for run in &runs {
            assert_eq!(run.in_use, last, "what {model} with {items} items keeps");
        }
        let most = runs.iter().map(|run| run.reserved).max().expect("runs");
        let ratio = footprint.peak.ratio(most);
        println!(
            "{model} {items}: predicted {}, measured {most}, ratio {ratio:.3}",
            footprint.peak
        );
        assert!((0.99..=1.10).contains(&ratio), "{model} with {items} items: {ratio}");
    }
}
