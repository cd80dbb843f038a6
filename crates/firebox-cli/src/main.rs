//! firebox on the command line: plans the training steps of saved traces and draws their memory.

mod args;
mod devices;
mod diff;
mod plan;
mod report;
mod table;
mod target;

use std::error::Error;
use std::fmt;
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::{self, ExitCode};

use clap::Parser;

use crate::args::{Command, Options};
use crate::plan::Outcome;

/// The exit code if the command line is wrong, as for clap.
const WRONG_USE: u8 = 2;

/// The exit code if a batch does not fit.
const DOES_NOT_FIT: u8 = 3;

/// What is wrong with the command line, where clap cannot tell.
#[derive(Debug)]
struct WrongUse(String);

impl fmt::Display for WrongUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for WrongUse {}

/// The error of a wrong command line.
fn wrong_use(message: impl Into<String>) -> anyhow::Error {
    WrongUse(message.into()).into()
}

/// Ends in silence if nobody reads the output any more, as in `firebox cards | head -1`.
fn end_with_the_pipe() {
    let before = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        if panic.to_string().contains("failed printing to stdout") {
            process::exit(0);
        }
        before(panic);
    }));
}

fn main() -> ExitCode {
    let options = Options::parse();
    end_with_the_pipe();
    // A file that was made to look like a trace may describe operations that burn panics at.
    let done = catch_unwind(AssertUnwindSafe(|| run(options.command)));
    match done {
        Ok(Ok(Outcome::Done)) => ExitCode::SUCCESS,
        Ok(Ok(Outcome::DoesNotFit)) => ExitCode::from(DOES_NOT_FIT),
        Ok(Err(error)) => {
            eprintln!("error: {error:#}");
            if error.is::<WrongUse>() { ExitCode::from(WRONG_USE) } else { ExitCode::FAILURE }
        }
        Err(_) => {
            eprintln!("error: the trace contradicts itself, or this is a defect of firebox");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> anyhow::Result<Outcome> {
    match command {
        Command::Plan(options) => return plan::plan(&options),
        Command::Largest(options) => return plan::largest(&options),
        Command::Report(options) => return report::report(&options),
        Command::Diff(options) => return diff::diff(&options),
        Command::Cards { json } => devices::cards(json)?,
        Command::Show { trace } => show(&trace)?,
    }
    Ok(Outcome::Done)
}

/// `firebox show`.
fn show(path: &Path) -> anyhow::Result<()> {
    let trace = plan::load(path)?;
    let about = trace.about();
    println!("model       {}", about.model);
    println!("parameters  {}", about.parameters);
    println!("recorded    on {}, a batch of {} items", about.backend, about.items);
    println!("firebox     {}", about.firebox);
    if let Some(splits) = &about.splits {
        println!("splits      {splits}");
    }
    if let Ok(whole) = trace.sample(firebox::plan::Split::whole(about.items)) {
        println!("operations  {} in two iterations on a whole batch", whole.trace.calls().count());
    }
    Ok(())
}
