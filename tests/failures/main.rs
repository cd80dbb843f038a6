//! Tests training on a device that fails.
//!
//! Each case has a process of its own, because a failure leaves traces in it. Without a Vulkan
//! device all are ignored.

mod alone;
mod cost;
mod device;
mod training;

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use device::{Fused, Unfused, small_device};

/// Time limit of a case. A case takes a few seconds; one that reaches the limit hangs.
const LIMIT: Duration = Duration::from_secs(180);

/// Not a test of its own: the process of a case.
#[test]
#[ignore = "run by the other tests"]
fn process() {
    let case = std::env::var("CASE").expect("the other tests say what to run");
    let device = small_device();
    match case.as_str() {
        "alone fused" => alone::losses::<burn::backend::Autodiff<Fused>>(&device),
        "alone unfused" => alone::losses::<burn::backend::Autodiff<Unfused>>(&device),
        "micro-steps fused" => training::micro_steps::<Fused>(&device),
        "micro-steps unfused" => training::micro_steps::<Unfused>(&device),
        "split fused" => training::split::<Fused>(&device),
        "equal fused" => training::equal::<Fused>(&device),
        "validation fused" => training::validation::<Fused>(&device),
        "validation unfused" => training::validation::<Unfused>(&device),
        "checkpoint fused" => training::checkpoint::<Fused>(&device),
        "checkpoint unfused" => training::checkpoint::<Unfused>(&device),
        "optimizer fused" => training::optimizer::<Fused>(&device),
        "optimizer unfused" => training::optimizer::<Unfused>(&device),
        "coupled fused" => training::coupled::<Fused>(&device),
        "coupled unfused" => training::coupled::<Unfused>(&device),
        "coupled there fused" => training::coupled_there::<Fused>(&device),
        "afterwards fused" => training::afterwards::<Fused>(&device),
        "cost fused" => cost::steps::<Fused>(&device),
        other => panic!("no case `{other}`"),
    }
}

/// Waits for a process until the time limit.
#[track_caller]
fn wait(child: &mut Child, case: &str) -> bool {
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("the process can be asked") {
            return status.success();
        }
        if started.elapsed() > LIMIT {
            child.kill().expect("the process can be ended");
            panic!("`{case}` hangs");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs a case and returns its output.
#[track_caller]
fn said(case: &str) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name| std::fs::File::create(folder.path().join(name)).expect("a file");
    let text = |name| std::fs::read_to_string(folder.path().join(name)).expect("the file is there");
    let mut child = Command::new(std::env::current_exe().expect("this test is a program"))
        .args(["--ignored", "--exact", "process", "--nocapture"])
        .env("CASE", case)
        .stdout(Stdio::from(file("out")))
        .stderr(Stdio::from(file("err")))
        .spawn()
        .expect("the test runs again");
    let succeeded = wait(&mut child, case);
    let out = text("out");
    assert!(succeeded, "{case}:\n{out}\n{}", text("err"));
    out
}

/// Measures the cost of the Learner's checks per step in the worst case: a model so small that a
/// step is all overhead.
#[test]
#[ignore = "a measurement, for a machine that does nothing else"]
fn cost_of_checks() {
    print!("{}", said("cost fused"));
}

#[track_caller]
fn check(case: &str) {
    said(case);
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn burn_alone_does_not_notice_with_fusion() {
    alone::check(said("alone fused"));
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn burn_alone_does_not_notice_without_fusion() {
    alone::check(said("alone unfused"));
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn a_failure_stops_before_the_optimizer_step_with_fusion() {
    check("micro-steps fused");
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn a_failure_stops_before_the_optimizer_step_without_fusion() {
    check("micro-steps unfused");
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn a_batch_that_fails_whole_fits_in_two_parts() {
    check("split fused");
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn checks_leave_what_burn_computes_bit_for_bit() {
    check("equal fused");
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn a_loss_that_is_no_sum_is_refused_with_fusion() {
    check("coupled fused");
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn a_loss_that_is_no_sum_is_refused_without_fusion() {
    check("coupled unfused");
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn where_the_host_cannot_compute_it_the_device_refuses_it() {
    check("coupled there fused");
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn a_failure_in_validation_is_an_error_with_fusion() {
    check("validation fused");
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn a_failure_in_validation_is_an_error_without_fusion() {
    check("validation unfused");
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn the_last_checkpoint_is_on_disk_with_fusion() {
    check("checkpoint fused");
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn the_last_checkpoint_is_on_disk_without_fusion() {
    check("checkpoint unfused");
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn a_failure_in_the_optimizer_leaves_no_state_with_fusion() {
    check("optimizer fused");
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn a_failure_in_the_optimizer_leaves_no_state_without_fusion() {
    check("optimizer unfused");
}

#[test]
#[cfg_attr(no_vulkan, ignore = "no Vulkan device")]
fn training_can_begin_again_after_a_failure() {
    check("afterwards fused");
}
