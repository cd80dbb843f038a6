//! Runs a program on a machine with one card that computes nothing: `cargo run -p firebox-blank
//! --example on_blank -- <program> [arguments]`. The program's CUDA calls cost the host what they
//! always do, apart from what the driver itself would do.

use std::process::ExitCode;

use firebox_blank::{Blank, Device, Settings};

fn main() -> Result<ExitCode, Box<dyn std::error::Error>> {
    let mut arguments = std::env::args_os().skip(1);
    let program = arguments.next().ok_or("which program?")?;
    let card = Device::new("H100 80GB", 80 << 30, (9, 0), 132);
    let blank = Blank::install(&Settings::new([card]))?;
    let status = blank.command(program).args(arguments).status()?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
