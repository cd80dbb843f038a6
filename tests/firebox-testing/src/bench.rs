//! What benches share: the facts of the machine, whether a run measures at all, and timing.

pub mod paired;
pub mod renderer;
pub mod turn;

use std::fs;

use firebox::plan::host_memory;

/// Prints the facts about the machine that every record names.
pub fn print_machine() {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let memory = host_memory().map_or_else(|_| "unknown".to_owned(), |host| host.total.to_string());
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split(' ').next().filter(|load| !load.is_empty()).unwrap_or("unknown");
    println!("machine: {cores} cores, {}, {memory} memory, load {load}", cpu_model());
}

/// Name of the processor as it reports it, on Linux.
fn cpu_model() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned())
}

/// Number of rounds: `rounds` in a bench, or one in a test that only checks that the program runs.
///
/// `cargo bench` passes `--bench`, `cargo test --benches` does not.
pub fn rounds(rounds: usize) -> usize {
    if std::env::args().any(|argument| argument == "--bench") { rounds } else { 1 }
}

/// Whether to run the part named `part`. With no filter on the command line, all parts run.
pub fn wants(part: &str) -> bool {
    let mut filters = std::env::args().skip(1).filter(|argument| !argument.starts_with('-'));
    let none = std::env::args().skip(1).all(|argument| argument.starts_with('-'));
    none || filters.any(|filter| part.contains(&filter))
}
