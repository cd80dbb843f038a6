//! Tests training on several ranks: processes that `mpirun` starts, on Flex.
//!
//! ```sh
//! apt-get install openmpi-bin libopenmpi-dev libclang-dev
//! cargo test -p firebox-tests --features mpi --test ranks
//! ```
//!
//! The long tests run only with `-- --ignored`. Their results are kept in `benches/record/`.

mod exact;
mod faults;
mod job;
mod launch;
mod long;
mod real;

fn main() -> std::process::ExitCode {
    if let Some(job) = job::Job::of_this_process() {
        return job.run();
    }
    let arguments = libtest_mimic::Arguments::from_args();
    let tests = [exact::tests(), real::tests(), faults::tests(), long::tests()];
    let tests = tests.into_iter().flatten();
    // Without `mpirun`, from Debian's openmpi-bin, they are ignored.
    let tests = match launch::has_mpirun() {
        true => tests.collect(),
        false => tests.map(|test| test.with_kind("no mpirun").with_ignored_flag(true)).collect(),
    };
    libtest_mimic::run(&arguments, tests).exit_code()
}
