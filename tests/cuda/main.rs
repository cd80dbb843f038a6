//! Tests training on CUDA.
//!
//! Tests that need computed values use the machine's NVIDIA device. Without one they are
//! ignored. All other tests run in child processes on the blank driver: burn's real CUDA backend,
//! its server and its allocator, on a driver that keeps books, computes nothing and refuses calls
//! on request.
//!
//! ```sh
//! CUDARC_CUDA_VERSION=13000 cargo test -p firebox-tests --features cuda --test cuda
//! ```
//!
//! The long tests run only with `-- --ignored`. Their results are kept in `benches/record/`.

mod budget;
mod child;
mod failures;
mod half;
mod largest;
mod long;
mod missing;
mod own_loop;
#[cfg(feature = "mpi")]
mod ranks;
mod trial;
mod values;

fn main() -> std::process::ExitCode {
    if let Some(job) = child::Job::of_this_process() {
        return job.run();
    }
    let arguments = libtest_mimic::Arguments::from_args();
    if firebox_testing::machine::has_nvidia() {
        eprintln!(
            "values are computed on the NVIDIA device; what has to fail runs on the blank driver"
        );
    } else {
        eprintln!("there is no NVIDIA device: run on the blank driver, which computes nothing");
    }
    #[cfg(feature = "mpi")]
    let of_ranks = ranks::tests();
    #[cfg(not(feature = "mpi"))]
    let of_ranks = Vec::new();
    let tests = [
        values::tests(),
        missing::tests(),
        budget::tests(),
        failures::tests(),
        long::tests(),
        largest::tests(),
        half::tests(),
        own_loop::tests(),
        of_ranks,
    ];
    libtest_mimic::run(&arguments, tests.into_iter().flatten().collect()).exit_code()
}
