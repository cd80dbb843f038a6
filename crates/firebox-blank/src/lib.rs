//! A CUDA driver that computes nothing and keeps books: burn's real CUDA backend runs on it on a machine without a GPU.
//!
//! cubecl-cuda loads `libcuda` and `libnvrtc` when the program runs, and firebox `libnvidia-ml`. This crate builds one
//! library with the functions of all three that they call. Put on the library path of a child process, it makes the
//! child's whole CUDA stack run: fusion, autotune, the server, streams, pinned memory and the allocator. Only the
//! kernels do not run, and what is read back is zeros.
//!
//! ```no_run
//! use firebox_blank::{Blank, Device, Settings};
//!
//! let settings = Settings::new([Device::new("RTX 3070", 8 << 30, (8, 6), 46)]);
//! let blank = Blank::install(&settings)?;
//! let output = blank.command("target/debug/my-test").arg("--child").output()?;
//! let books = blank.books()?;
//! println!("{} bytes at the most", books[0].device(0).peak());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A test tells its child processes what the machine has ([`Settings`]), reads what the driver counted after a child ended
//! or crashed ([`Books`]), and what it did in order ([`read_journal`]). While a child runs, the test can take memory away in
//! another process's name ([`Books::set_taken_by_others`]).
//!
//! # How memory is counted
//!
//! By the bytes that are asked for, without a driver's own rounding, when the call is made. A free takes effect when it is
//! called; with [`Completions::Late`] a free in a stream's order takes effect when the stream gets there. Each device holds
//! its context from the first time that it is retained until the process ends. Addresses are never used twice, so that
//! a use after a free is always noticed.
//!
//! # Misuse
//!
//! What a debug allocator would notice is written to the journal and counted ([`DeviceBooks::misuses`]): a second free, a free
//! of unknown memory, copies and kernel arguments outside live memory, work on a stream or an event that is not there.
//! A function that the driver does not have is missing from the library, and cudarc names it when it looks for it.
//!
//! NCCL is not part of it.

mod books;
mod install;
mod journal;
mod settings;

pub mod driver;

pub use books::{Books, BooksError, Call, DeviceBooks, MAX_DEVICES};
pub use install::{Blank, InstallError};
pub use journal::{Entry, Journal, JournalError, read_journal};
pub use settings::{Completions, Device, Fault, KernelTimes, SETTINGS_VARIABLE, Settings, Target};
