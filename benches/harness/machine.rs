//! What a figure was measured on, and whether it is measured at all.

use std::fs;

use firebox::host_memory;

/// Prints the facts of the machine that every record names.
pub fn print() {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let memory = host_memory().map_or_else(|_| "unknown".to_owned(), |host| host.total.to_string());
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split(' ').next().filter(|load| !load.is_empty()).unwrap_or("unknown");
    println!("machine: {cores} cores, {}, {memory} memory, load {load}", cpu_model());
}

/// The name that the processor gives itself, on Linux.
fn cpu_model() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned())
}

/// How often to measure: `rounds`, or once where `cargo test` only wants to see the program run.
///
/// `cargo bench` passes `--bench`, `cargo test --benches` does not.
pub fn rounds(rounds: usize) -> usize {
    if std::env::args().any(|argument| argument == "--bench") { rounds } else { 1 }
}

/// Whether the program was asked for the parts whose names contain `part`: all, if it was asked for none.
pub fn wants(part: &str) -> bool {
    let mut filters = std::env::args().skip(1).filter(|argument| !argument.starts_with('-'));
    let none = std::env::args().skip(1).all(|argument| argument.starts_with('-'));
    none || filters.any(|filter| part.contains(&filter))
}
