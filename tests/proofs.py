"""What `make test` leaves to `make proofs`: slow tests whose kind has a faster one in the suite.

    make test      everything else, within 20 minutes on two cores
    make proofs    these alone; before a release, and where their subject was changed

One of them is no slow one: a limit of memory counts what is not yet written to the disk, and a
machine whose other tests write as well may be too slow for it. Proofs run one at a time.

By folder and file: names of tests as pytest shows them, or how these begin. pytest without a
selection runs both.
"""

PROOFS: dict[str, tuple[str, ...]] = {
    "averaging/test_admm.py": (
        "test_logistic_regression_agrees_on_the_point_where_the_joint_gradient_vanishes",
    ),
    "collectives/conformance/test_conformance_groups.py": (
        "test_groups_of_some_ranks[c-4]",
        "test_groups_of_some_ranks[torch-4]",
        "test_overlapping_groups_are_used_in_turn[c-4]",
        "test_overlapping_groups_are_used_in_turn[torch-4]",
    ),
    "collectives/conformance/test_conformance_schedules.py": (
        "test_random_schedules_arrive_at_what_their_seeds_say[torch]",
    ),
    "collectives/conformance/test_conformance_worlds.py": (
        "test_a_torchrun_job_trains_on_it",
        "test_scripts_without_a_world_of_dure_use_it_and_end[without a word]",
        "test_the_import_registers_it_whichever_comes_first_and_stays_light",
    ),
    "collectives/shared_memory/test_core.py": (
        "test_a_sanitizer_sees_no_race",
        "test_an_exchange_that_is_broken_on_purpose_is_seen",
        "test_what_is_broken_on_purpose_is_seen",
    ),
    "collectives/shared_memory/test_endings.py": (
        "test_a_script_under_torchrun_finds_its_ranks_and_uses_either_core",
    ),
    "collectives/shared_memory/test_portable.py": (
        "test_kernels_compute_what_torch_does[avx2-sum of uint8]",
    ),
    "collectives/shared_memory/two_hosts/test_across.py": (
        "test_a_hung_rank_is_named_on_both_hosts_and_is_told_too[no leader]",
        "test_a_hung_rank_is_named_on_both_hosts_and_is_told_too[the first leader]",
        "test_who_is_lost_while_planned_calls_are_under_way_is_named[torch-",
    ),
    "equivalence/test_trained_alike.py": (
        "test_averages_are_those_of_the_models_of_every_step_and_go_on_to_the_same_bits[parallel-",
    ),
    "equivalence/test_what_losses_count.py": (
        "test_admm_goes_to_the_minimum_of_the_loss_of_all_data",
    ),
    "federated/aggregate/test_same_models.py": (
        "test_a_model_has_the_same_bits_with_and_without_fused_multiply_add[avx2]",
        "test_a_model_has_the_same_bits_with_and_without_fused_multiply_add[avx512]",
    ),
    "federated/engines/test_engine_ray.py": (
        "test_a_client_that_diverges_is_a_failure_and_a_lost_actor_names_the_client",
        "test_an_actor_without_progress_is_an_error_that_names_the_client",
        "test_a_run_on_it_is_the_run_without_it",
        "test_frozen_weights_that_are_not_those_of_the_seed_reach_the_actors",
        "test_what_a_tasks_file_registers_and_what_is_set_here_is_there_too",
    ),
    "machine/test_memory.py": (
        "test_large_tensors_of_ranks_ask_for_huge_pages_unless_the_user_does_not",
        "test_thresholds_of_the_user_stay_in_ranks",
    ),
    "machine/test_torch_backend.py": (
        "test_whichever_is_imported_first[import torch.distributed]",
    ),
    "memory/test_under_a_limit.py": (
        "test_divided_it_trains_as_undivided_without_the_limit_and_whole_not_at_all",
    ),
    "parallel/data/test_distributed.py": (
        "test_every_all_reduce_size_of_bucket_and_way_walks_the_path_of_one_process[3]",
        "test_uneven_data_without_join_names_the_rank_that_has_ended[gloo]",
        "test_uneven_data_without_join_names_the_rank_that_has_ended[torch's own gloo]",
    ),
    "parallel/mesh/test_mesh_strategy.py": (
        "test_a_language_model_of_hugging_face_on_meshes",
        "test_eight_ranks_with_everything_at_once_clip_by_the_whole_norm",
    ),
    "parallel/pipeline/test_pipeline_checkpoint.py": (
        "test_a_run_goes_on_with_other_ranks_and_schedules[groups]",
        "test_groups_of_the_optimizer_go_to_other_meshes[0]",
        "test_groups_of_the_optimizer_go_to_other_meshes[1]",
    ),
    "parallel/pipeline/test_pipeline_equal.py": (
        "test_data_groups_of_pipelines",
        "test_steps_are_those_of_the_undivided_model[2]",
        "test_steps_are_those_of_the_undivided_model[3]",
        "test_steps_are_those_of_the_undivided_model[4]",
    ),
    "parallel/pipeline/test_pipeline_models.py": ("test_language_models_of_hugging_face",),
    "parallel/pipeline/test_pipeline_proof.py": (
        "test_what_a_trace_has_is_proven_and_trains_as_one_worker_does[cached]",
        "test_what_a_trace_has_is_proven_and_trains_as_one_worker_does[clamped]",
        "test_what_a_trace_has_is_proven_and_trains_as_one_worker_does[dropped]",
        "test_what_a_trace_has_is_proven_and_trains_as_one_worker_does[in_training_alone]",
        "test_what_a_trace_has_is_proven_and_trains_as_one_worker_does[within_no_grad]",
    ),
    "parallel/pipeline/test_pipeline_random_models.py": ("test_random_models_learn_the_same[1]",),
    "parallel/pipeline/test_untraced.py": (
        "test_a_module_that_cannot_be_traced_is_proven_as_it_is[doubles]",
        "test_a_module_that_cannot_be_traced_is_proven_as_it_is[hooks]",
        "test_blocks_that_chance_leaves_out_are_proven[asks_twice]",
    ),
    "parallel/tensor/test_tensor_models.py": ("test_models_of_hugging_face",),
    "parallel/tensor/test_tensor_tables.py": ("test_meshes_walk_the_path_of_one_worker[pipeline]",),
    "parallel/tensor/test_written_plan.py": (
        "test_a_model_divided_by_its_own_plan_walks_the_path_of_one_worker[python-",
    ),
    "parallel/test_transformers_four.py": ("test_models_of_the_version_before_are_divided_too",),
    "parallel/zero/test_zero.py": ("test_a_rank_holds_the_bytes_of_the_formula[2]",),
    "parallel/zero/test_zero_models.py": (
        "test_every_model_walks_the_path_of_one_process[a rank without examples]",
    ),
    "parallel/zero/test_zero_strategy.py": (
        "test_every_stage_walks_the_path_of_one_worker[3-1]",
        "test_every_stage_walks_the_path_of_one_worker[3-2]",
        "test_every_stage_walks_the_path_of_one_worker[4-1]",
        "test_every_stage_walks_the_path_of_one_worker[4-2]",
        "test_pieces_and_clipping_are_those_of_data_parallel[1]",
    ),
    "parameter_server/test_ending_rounds.py": (
        "test_the_stages_of_a_replica_end_after_the_same_step",
    ),
    "parameter_server/test_histories.py": (
        "test_over_streams_nothing_need_be_said_again_by_the_clock",
    ),
    "parameter_server/test_own_loop.py": ("test_the_loop_of_the_page_runs_under_torchrun",),
    "report/test_report_browser.py": (
        "test_an_unusual_run_opens_too[no-labels",
        "test_an_unusual_run_opens_too[thousand",
        "test_fifteen_runs_open_and_fit",
    ),
    "run/test_hugging_face_layout.py": (
        "test_from_pretrained_loads_the_model_of_every_system[pipeline]",
        "test_no_library_is_loaded_for_another_model",
        "test_peft_loads_the_adapter[pipeline-processes]",
    ),
    "run/test_resume.py": (
        "test_a_killed_run_goes_on_to_the_same_bits[admm]",
        "test_a_killed_run_goes_on_to_the_same_bits[threads]",
    ),
    "run/test_what_measuring_sends.py": (
        "test_bytes_are_those_of_the_training_however_often_it_is_evaluated[diloco]",
        "test_bytes_are_those_of_the_training_however_often_it_is_evaluated[parallel-sgd]",
    ),
    "security/test_fuzzers.py": (
        "test_nothing_that_is_sent_for_minutes_is_a_mistake_of_the_server",
    ),
    "split/test_optimizer_settings.py": (
        "test_a_run_and_a_resumed_one_are_plain_pytorch[SplitFed v1-list]",
        "test_a_run_and_a_resumed_one_are_plain_pytorch[SplitFed v1-number]",
        "test_a_run_and_a_resumed_one_are_plain_pytorch[SplitFed v1-shared]",
        "test_a_run_and_a_resumed_one_are_plain_pytorch[SplitFed v1-tensor]",
        "test_a_run_and_a_resumed_one_are_plain_pytorch[in turn, peers-list]",
        "test_a_run_and_a_resumed_one_are_plain_pytorch[in turn, peers-number]",
        "test_a_run_and_a_resumed_one_are_plain_pytorch[in turn, peers-tensor]",
        "test_a_run_and_a_resumed_one_are_plain_pytorch[in turn, personal-list]",
        "test_a_run_and_a_resumed_one_are_plain_pytorch[in turn, personal-shared]",
        "test_a_run_and_a_resumed_one_are_plain_pytorch[in turn, server-number]",
        "test_a_run_and_a_resumed_one_are_plain_pytorch[in turn, server-shared]",
        "test_a_run_and_a_resumed_one_are_plain_pytorch[parallel-added later]",
        "test_a_run_and_a_resumed_one_are_plain_pytorch[parallel-number]",
        "test_a_run_and_a_resumed_one_are_plain_pytorch[parallel-shared]",
    ),
    "split/test_parties_apart.py": (
        "test_whenever_a_party_is_gone_and_comes_again_no_bit_changes[server]",
    ),
    "split/test_split_conditions.py": (
        "test_a_client_that_drops_out_leaves_nothing[SplitFed v1 none",
        "test_a_client_that_drops_out_leaves_nothing[split no-peek",
        "test_a_client_that_drops_out_leaves_nothing[split none server",
        "test_a_run_that_is_resumed_has_the_same_bits_bytes_and_times[SplitFed v1 none",
        "test_a_run_that_is_resumed_has_the_same_bits_bytes_and_times[split no-peek",
        "test_a_run_that_is_resumed_has_the_same_bits_bytes_and_times[split none server",
        "test_clients_who_are_always_there_train_as_if_nobody_looked[SplitFed v1 none",
        "test_clients_who_are_always_there_train_as_if_nobody_looked[split no-peek",
        "test_clients_who_are_always_there_train_as_if_nobody_looked[split none server",
    ),
    "test_benchmark_deployed.py": (
        "test_rounds_are_measured_with_whole_clients_and_with_light_ones",
    ),
    "test_benchmarks_quick.py": ("test_a_script_runs_in_its_shortest_form",),
    "test_docs.py": ("test_the_pages_build_without_a_warning_and_load_nothing_from_elsewhere",),
    "test_example_scripts.py": (
        "test_an_example_is_short_and_runs[averaging]",
        "test_an_example_is_short_and_runs[fed_nova]",
        "test_an_example_is_short_and_runs[handwriting_by_writer]",
        "test_an_example_is_short_and_runs[lora]",
        "test_an_example_is_short_and_runs[model_parallel]",
        "test_an_example_is_short_and_runs[moon]",
        "test_an_example_is_short_and_runs[power_of_choice]",
        "test_an_example_is_short_and_runs[split_learning]",
        "test_an_example_is_short_and_runs[zero]",
    ),
    "test_features_run.py": (
        "test_frozen_layers_and_resume[downpour-ranks",
        "test_frozen_layers_and_resume[parameter-server-ranks",
        "test_schedule_validation_and_early_stopping[downpour-ranks",
        "test_schedule_validation_and_early_stopping[parameter-server-ranks",
    ),
    "test_processors.py": ("test_tests_of_equal_bits_hold_under_every_instruction_set",),
    "test_snippets.py": (
        "test_the_python_of_a_page_runs[collectives.md]",
        "test_the_python_of_a_page_runs[shared-memory.md]",
        "test_the_python_of_a_page_runs[split-leakage.md]",
        "test_the_python_of_a_page_runs[stopping.md]",
        "test_the_python_of_a_page_runs[tutorial-does-not-fit.md]",
        "test_the_python_of_a_page_runs[tutorial-slow-link.md]",
    ),
    "test_snippets_shell.py": (
        "test_the_shell_lines_of_a_page_run[",
        "test_the_shell_lines_of_the_first_pages_run[README.md]",
    ),
    "trainers/test_hugging_face.py": (
        "test_a_client_whose_process_is_killed_goes_on_with_its_round",
        "test_several_clients_are_those_of_the_simulation[fed-adam]",
        "test_several_clients_are_those_of_the_simulation[fed-buff]",
        "test_several_clients_are_those_of_the_simulation[median]",
        "test_terms_of_an_algorithm_are_added_as_by_dures_loop[0.0-",
    ),
    "trainers/test_ranks.py": (
        "test_two_ranks_are_one_client[ddp]",
        "test_two_ranks_are_one_client[lightning]",
        "test_ranks_that_go_on_over_rounds_are_one_client[keep]",
    ),
    "deploy/test_audited.py": (
        "test_every_message_that_left_has_its_line_and_every_line_its_message[parallel]",
        "test_every_message_that_left_has_its_line_and_every_line_its_message[split, through",
    ),
    "deploy/test_bad_links.py": (
        "test_a_run_over_bad_links_has_the_bits_of_one_over_good_ones[plain]",
    ),
    "deploy/test_deployed_bits.py": (
        "test_a_deployed_federation_has_the_bits_of_the_simulation[Byzantine GD]",
        "test_a_deployed_federation_has_the_bits_of_the_simulation[Ditto]",
        "test_a_deployed_federation_has_the_bits_of_the_simulation[FedAdam]",
        "test_a_deployed_federation_has_the_bits_of_the_simulation[FedAvg with batch norm",
        "test_a_deployed_federation_has_the_bits_of_the_simulation[FedAvg with weights of classes]",
    ),
    "deploy/test_held_killed.py": (
        "test_a_server_that_is_killed_uses_each_sum_once[after_the_event]",
    ),
    "deploy/test_killed.py": (
        "test_a_server_that_is_killed_goes_on_with_the_same_bits[SCAFFOLD]",
        "test_clients_that_are_killed_go_on_with_the_same_bits[SCAFFOLD]",
    ),
    "deploy/test_replayed.py": (
        "test_a_recorded_run_has_the_same_bits_when_it_is_replayed[FedBuff]",
    ),
    "deploy/test_secure_killed.py": (
        "test_a_server_that_is_killed_finishes_the_sum[before_any_has_unmasked]",
        "test_a_server_that_is_killed_finishes_the_sum[once_all_have_unmasked]",
    ),
    "deploy/test_split_deployed.py": (
        "test_a_server_that_is_killed_goes_on_with_the_turn_after[strategy1]",
        "test_deployed_split_learning_has_the_bits_of_the_simulation[in turn]",
        "test_the_round_goes_on_without_a_client_that_never_takes_over",
    ),
    "worlds/processes/test_processes.py": ("test_a_stopped_rank_is_named_within_the_deadline[0]",),
    "worlds/test_simulated_resume.py": (
        "test_ended_again_and_again_and_gone_on_with_it_has_the_same_bits[arriving-loop]",
        "test_ended_again_and_again_and_gone_on_with_it_has_the_same_bits[attack-median-loop]",
        "test_ended_again_and_again_and_gone_on_with_it_has_the_same_bits[attack-that-draws-loop]",
        "test_ended_again_and_again_and_gone_on_with_it_has_the_same_bits[poisson-loop]",
        "test_ended_again_and_again_and_gone_on_with_it_has_the_same_bits[scaffold-drop-outs-loop]",
    ),
    "worlds/torchrun/test_elastic.py": ("test_a_machine_joins_and_the_one_with_rank_0_is_killed",),
    "worlds/torchrun/test_torchrun.py": (
        "test_a_comparison_goes_on_behind_a_system_that_fails",
        "test_ranks_that_hold_parts_of_the_model_end_well",
        "test_servers_and_workers_are_ranks_and_all_of_them_end_well",
    ),
}
