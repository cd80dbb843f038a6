//! Tests training on CUDA.
//!
//! Tests that need computed values use the machine's NVIDIA device. Without one they are listed as
//! not run. All other tests run in child processes on the blank driver: burn's real CUDA backend,
//! its server and its allocator, on a driver that keeps books, computes nothing and refuses calls
//! on request.
//!
//! ```sh
//! CUDARC_CUDA_VERSION=13000 cargo test --features cuda --test cuda
//! ```
//!
//! The long tests run only with `-- --ignored`. Their results are kept in `benches/record/`.

#[cfg(feature = "cuda")]
mod budget;
#[cfg(feature = "cuda")]
mod child;
#[cfg(feature = "cuda")]
mod failures;
#[cfg(feature = "cuda")]
mod half;
#[cfg(feature = "cuda")]
mod largest;
#[cfg(feature = "cuda")]
mod long;
#[cfg(feature = "cuda")]
mod missing;
#[cfg(feature = "cuda")]
mod own_loop;
#[cfg(all(feature = "cuda", feature = "mpi"))]
mod ranks;
#[cfg(feature = "cuda")]
mod trial;
#[cfg(feature = "cuda")]
mod values;

#[cfg(feature = "cuda")]
fn main() -> std::process::ExitCode {
    if let Some(job) = child::Job::of_this_process() {
        return job.run();
    }
    let arguments = libtest_mimic::Arguments::from_args();
    if firebox_testing::machine::has_nvidia() {
        println!(
            "values are computed on the NVIDIA device; what has to fail runs on the blank driver"
        );
    } else {
        println!("there is no NVIDIA device: run on the blank driver, which computes nothing");
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

#[cfg(not(feature = "cuda"))]
fn main() {
    println!("not run: cuda (needs the feature `cuda`)");
}
