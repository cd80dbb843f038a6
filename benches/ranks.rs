//! What an exchange of gradients between ranks takes, on this machine and on paper.
//!
//! ```sh
//! cargo bench -p firebox-tests --features mpi --bench ranks
//! ```
//!
//! Measured are a round of messages, and the sum of as many numbers as a model has parameters,
//! given and taken in pieces as gradients are. On paper are the bytes of a ring, in which each of
//! `n` ranks sends and receives `2 (n - 1) / n` of the gradient (Patarasuk and Yuan, "Bandwidth
//! optimal all-reduce algorithms for clusters of workstations", 2009), and 6 operations for each
//! parameter and token (Kaplan et al., "Scaling laws for neural language models", 2020, section
//! 2.1).

use std::process::Command;
use std::time::{Duration, Instant};

use comfy_table::presets::ASCII_MARKDOWN;
use comfy_table::{CellAlignment, Table};
use firebox::Ranks;
use firebox::ranks::Summing;
use firebox_testing::bench::print_machine;

/// Millions of parameters that are summed.
const MILLIONS: [usize; 3] = [10, 50, 124];

/// The numbers in a piece, as in a gradient of a layer.
const PIECE: usize = 768 * 3072;

const REPEATS: usize = 7;

/// What the table on paper assumes of a device: operations in a second, and tokens in a batch.
const RATE: f64 = 4e14;
const TOKENS: f64 = 32_768.0;

/// The environment variable of a rank.
const VARIABLE: &str = "FIREBOX_RANKS_BENCH";

fn main() {
    if std::env::var_os(VARIABLE).is_some() {
        return measure(&Ranks::mpi().expect("MPI starts"));
    }
    // `cargo test -p firebox-tests --benches` only wants to know that it runs.
    if !std::env::args().any(|argument| argument == "--bench") {
        println!("not run: ranks (needs `cargo bench`)");
        return;
    }
    print_machine();
    println!("Measured: one machine, processes share its cores.\n");
    for world in 1..=4 {
        let program = std::env::current_exe().expect("this program has a path");
        let status = Command::new("mpirun")
            .args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"])
            .args(["-n", &world.to_string()])
            .arg(program)
            .env(VARIABLE, "1")
            .status();
        assert!(status.expect("mpirun starts").success(), "{world} ranks failed");
    }
    println!("\nOn paper: share of a step that the exchange takes if nothing hides it.\n");
    paper();
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

fn measure(ranks: &Ranks) {
    let say = |text: String| {
        if ranks.is_root() {
            println!("{text}");
        }
    };
    let tell = || ranks.tell(&0_u8).expect("all ranks answer");
    tell();
    let rounds = (0..200).map(|_| {
        let began = Instant::now();
        tell();
        began.elapsed()
    });
    let world = ranks.world();
    say(format!("{world} ranks: a round of messages {:.0?}", median(rounds.collect())));
    for millions in MILLIONS {
        let piece = vec![1.0_f32; PIECE];
        let all = millions * 1_000_000;
        let times = (0..REPEATS).map(|_| {
            tell();
            let began = Instant::now();
            let mut summing = Summing::of(ranks);
            let mut taken = 0;
            let mut given = 0;
            while given < all {
                let now = PIECE.min(all - given);
                summing.give(&piece[..now]).expect("all ranks answer");
                given += now;
                while let Some(sums) = summing.take(PIECE) {
                    assert_eq!(sums[0], world as f32);
                    taken += sums.len();
                }
            }
            summing.flush().expect("all ranks answer");
            taken += summing.take(all - taken).map_or(0, |sums| sums.len());
            assert_eq!(taken, all);
            began.elapsed()
        });
        let time = median(times.collect());
        let bytes = 4.0 * all as f64;
        say(format!(
            "{world} ranks: {millions} M parameters, {:.0} MB each: {time:.2?}, {:.2} GB/s",
            bytes / 1e6,
            bytes / 1e9 / time.as_secs_f64()
        ));
    }
}

fn paper() {
    let mut table = Table::new();
    table.load_preset(ASCII_MARKDOWN);
    table.set_header([
        "parameters",
        "ranks",
        "sent by each",
        "step alone",
        "1 Gbit/s",
        "10 Gbit/s",
        "100 Gbit/s",
        "10 Gbit/s, 16 batches accumulated",
    ]);
    for millions in [10.0, 124.0, 1300.0, 7000.0] {
        for ranks in [2.0, 8.0] {
            let parameters = millions * 1e6;
            let bytes = 4.0 * parameters * 2.0 * (ranks - 1.0) / ranks;
            let step = 6.0 * parameters * TOKENS / RATE;
            let share = |gigabits: f64, batches: f64| {
                let exchange = bytes * 8.0 / (gigabits * 1e9);
                format!("{:.0} %", 100.0 * exchange / (exchange + batches * step))
            };
            table.add_row([
                format!("{millions} M"),
                format!("{ranks}"),
                format!("{:.2} GB", bytes / 1e9),
                format!("{step:.3} s"),
                share(1.0, 1.0),
                share(10.0, 1.0),
                share(100.0, 1.0),
                share(10.0, 16.0),
            ]);
        }
    }
    table.column_iter_mut().for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    println!("{table}");
    println!(
        "\nA step: {TOKENS} tokens on each rank, at {:.0} Tflop/s, 6 operations for a parameter and token.",
        RATE / 1e12
    );
}
