//! Running statistics in loops of the user's own.

use super::*;

#[test]
fn rehearsals_leave_running_statistics_and_random_numbers() {
    let device = Default::default();
    let norm = BatchNormConfig::new(4).init(&device);
    let mut model = Normed::<B> { norm, linear: LinearConfig::new(4, 1).init(&device) };
    let mean = |model: &Normed<B>| model.norm.running_mean.value_sync().into_data();
    let before = mean(&model);
    let builder = Learner::builder().auto_batch().memory(Bytes::mib(64)).quiet();
    let mut steps = builder.step_planner(&model).expect("it is ready");
    let mut optim = AdamConfig::new().init::<B, Normed<B>>();
    let seen = Cell::new(0);
    let error = steps.step(&mut model, &mut optim, &points(40), |model, _, parts| {
        if !is_rehearsal() {
            return Err(TrainError::EmptyLoader);
        }
        seen.set(seen.get() + 1);
        parts.each(model, |model, points| drop(model.norm.forward(points.inputs)), |_, (), _| ())
    });
    assert!(matches!(error, Err(TrainError::EmptyLoader)) && seen.get() >= 2);
    assert_eq!(mean(&model), before);
    let plan = &steps.plans()[0];
    assert!(plan.running_state.iter().any(|path| path == "norm.running_mean"), "{plan:?}");
}

#[test]
fn a_step_that_fails_leaves_the_running_statistics_of_the_last_update() {
    let device = Default::default();
    let norm = BatchNormConfig::new(4).init(&device);
    let mut model = Normed::<B> { norm, linear: LinearConfig::new(4, 1).init(&device) };
    let mean = |model: &Normed<B>| model.norm.running_mean.value_sync().into_data();
    let builder = Learner::builder().auto_batch().memory(Bytes::mib(64)).micro_batch(20).quiet();
    let mut steps = builder.step_planner(&model).expect("it is ready");
    let mut optim = AdamConfig::new().init::<B, Normed<B>>();
    let mut run = |model: &mut Normed<B>, updates: bool, fails: bool| {
        steps.step(model, &mut optim, &points(40), |model, _, parts| {
            let pass =
                |model: &Normed<B>, points: Points<B>| drop(model.norm.forward(points.inputs));
            parts.each(model, pass, |_, (), _| ())?;
            if updates {
                parts.update(model, |_| ())?;
                parts.each(model, pass, |_, (), _| ())?;
            }
            if fails && !is_rehearsal() { Err(TrainError::EmptyLoader) } else { Ok(()) }
        })
    };
    let fresh = mean(&model);
    assert!(run(&mut model, false, true).is_err());
    assert_eq!(mean(&model), fresh, "nothing was learned");
    run(&mut model, false, false).expect("it fits");
    let once = mean(&model);
    assert_ne!(once, fresh);
    // Those of the pass before the update stay, those of the pass after it do not.
    assert!(run(&mut model, true, true).is_err());
    let twice = mean(&model);
    assert_ne!(twice, once);
    run(&mut model, false, false).expect("it fits");
    let thrice = mean(&model);
    let close = |value: f64, to: f64| (value - to).abs() < 1e-6;
    let first = |data: &TensorData| f64::from(data.to_vec::<f32>().expect("floats")[0]);
    let steps = [&fresh, &once, &twice, &thrice].map(first);
    // Each pass brings the mean closer to that of the inputs by the same factor.
    let factor = |of: usize| (steps[of + 1] - steps[of]) / (steps[1] - steps[0]);
    assert!(close(factor(2), factor(1) * factor(1)), "{steps:?}");
}
