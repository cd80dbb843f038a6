//! Trains with the real CUDA backend, each time in a process of its own, on a driver that keeps
//! books and computes nothing. Kernels are compiled with NVIDIA's library of functions, in
//! `$CUDA_PATH/nvvm/libdevice`; `.ci/native-cuda` brings it.

use std::process::Command;

use burn::tensor::Device;
use firebox::{Budget, Bytes, Fitted, Learner};
use firebox_blank::{Blank, Settings};

use net::{Kind, train_on};

mod net;

const CHILD: &str = "FIREBOX_CHILD";

/// Runs this test program's [`child`] on a card of `memory` bytes. Returns what it prints after
/// `result: `, and the most that the driver gave out.
fn trained(memory: Bytes, kind: &str) -> (String, Bytes) {
    let card = firebox_blank::Device::new("card", memory.get(), (9, 0), 132).with_context(64 << 20);
    let blank = Blank::install(&Settings::new([card])).expect("it can be installed");
    let libraries = std::env::var_os("CUDA_PATH").expect("`CUDA_PATH` has `nvvm/libdevice`");
    let program = std::env::current_exe().expect("it has a path");
    let mut command: Command = blank.command(program);
    command.env("CUDA_PATH", libraries).env(CHILD, kind);
    let output = command.args(["child", "--exact", "--ignored", "--nocapture"]).output();
    let output = output.expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout);
    let result = text.lines().find_map(|line| line.strip_prefix("result: "));
    let errors = String::from_utf8_lossy(&output.stderr);
    let result = result.unwrap_or_else(|| panic!("{text}\n{errors}"));
    let books = blank.books().expect("the child called the driver");
    let most = books.iter().map(|books| books.device(0).peak()).max().unwrap_or_default();
    (result.to_owned(), Bytes::new(most))
}

#[test]
#[ignore = "the other tests run it on a driver"]
fn child() {
    let kind = match std::env::var(CHILD).expect("a test sets it").as_str() {
        "norm" => Kind::Norm,
        _ => Kind::Plain,
    };
    let device = Device::cuda(0_usize).autodiff();
    // All that the driver says is free.
    let budget = Budget::free().margin(Bytes::mib(1));
    let fitted = train_on(
        &device,
        kind,
        Learner::builder().auto_batch().memory(budget).split_although_coupled(),
    );
    let Fitted { plans, predicted, measured, .. } = fitted.expect("it fits");
    let plan = &plans[0].plan;
    println!("result: {} {} {} {plan}", predicted.get(), measured.get(), plans[0].budget.get());
}

fn numbers(result: &str) -> [Bytes; 3] {
    let mut numbers = result.split(' ').map(|number| Bytes::new(number.parse().unwrap_or(0)));
    [(); 3].map(|()| numbers.next().expect("three numbers"))
}

#[test]
fn a_batch_is_planned_for_what_is_free_and_stays_within_the_prediction() {
    let (roomy, _) = trained(Bytes::gib(8), "plain");
    let (tight, most) = trained(Bytes::mib(64 + 38), "plain");
    println!("{roomy}; {tight}; the driver gave out {most} at the most");
    for result in [&roomy, &tight] {
        let [predicted, measured, budget] = numbers(result);
        assert!(measured <= predicted && predicted <= budget, "{result}");
    }
    assert!(roomy.ends_with("1024 = 1 x 1024"), "{roomy}");
    assert!(!tight.ends_with("1 x 1024"), "{tight}");
    let [predicted, ..] = numbers(&tight);
    assert!(most <= predicted, "{most} of {predicted}");
}
