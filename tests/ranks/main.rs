//! Tests training on several ranks: processes that `mpirun` starts, on Flex.
//!
//! ```sh
//! apt-get install openmpi-bin libopenmpi-dev libclang-dev
//! cargo test --features mpi --test ranks
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
    if !launch::has_mpirun() {
        println!("not run: ranks (needs `mpirun`, from Debian's openmpi-bin)");
        return std::process::ExitCode::SUCCESS;
    }
    let tests = [exact::tests(), real::tests(), faults::tests(), long::tests()];
    libtest_mimic::run(&arguments, tests.into_iter().flatten().collect()).exit_code()
}
